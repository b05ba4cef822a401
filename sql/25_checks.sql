-- 25 _is_plain: whether a text is printable ASCII, not blank, and short: the names and keys nearly everybody uses, told
-- by one expression. Anything else is looked at by _check_name.
create or replace function almanac._is_plain(name text, max_length integer)
    returns boolean
    language sql immutable parallel safe
    return length(name) <= max_length and name ~ '^[ -~]*[!-~][ -~]*$';
comment on function almanac._is_plain(text, integer) is 'Whether a name is plain ASCII and good.';

-- 25 _check_name: names are any text that can be read: quotes, unicode, percent signs and line breaks included, but no
-- other control characters, none that reverse or hide what is shown, and not invisible ones alone. Here and elsewhere a
-- backslash is written with E: without it, what it means is a setting of the caller's session.
create or replace function almanac._check_name(what text, name text, max_length integer)
    returns void
    language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
begin
    if _check_name.name is null then
        raise exception using errcode = '22004',
            message = format('%s must not be null', _check_name.what),
            hint    = format('Give %s a name of 1 to %s characters.', _check_name.what, _check_name.max_length);
    end if;
    if length(_check_name.name) > _check_name.max_length
       or _check_name.name !~
          E'[^\\s\\u034f\\u115f\\u1160\\u180b-\\u180e\\u200c\\u200d\\u2800\\u3164\\ufe00-\\ufe0f\\uffa0]'
       or _check_name.name ~
          E'[\\u0001-\\u0008\\u000b-\\u001f\\u007f\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff]'
       or getdatabaseencoding() = 'UTF8' and _check_name.name ~ E'[\\u0080-\\u009f]' then
        raise exception using errcode = '22023',
            message = format('the name of %s must have 1 to %s characters that can be read',
                             _check_name.what, _check_name.max_length),
            detail  = format('It has %s, as a JSON string: %s', length(_check_name.name),
                             to_jsonb(left(_check_name.name, 50))),
            hint    = 'Leave out control characters and invisible ones, or choose a shorter name.';
    end if;
end;
$$;
comment on function almanac._check_name(text, text, integer) is 'Raises unless the name is readable and short enough.';

-- 25 _payload_bytes: a value that comes out of a table may be compressed, and then its column size says nothing.
create or replace function almanac._payload_bytes(payload jsonb)
    returns integer
    language sql stable parallel safe
    return case when pg_column_compression(_payload_bytes.payload) is null then pg_column_size(_payload_bytes.payload)
                else octet_length(_payload_bytes.payload::text) end;
comment on function almanac._payload_bytes(jsonb) is 'How large a payload is.';

-- 25 _check_payload: an object or an array, and headers, which are an object; together within the queue's size.
-- Calls: _payload_bytes.
create or replace function almanac._check_payload(payload jsonb, headers jsonb, max_bytes integer)
    returns void
    language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
declare
    v_bytes integer := almanac._payload_bytes(_check_payload.payload)
                       + coalesce(almanac._payload_bytes(_check_payload.headers), 0);
begin
    if _check_payload.payload is null or jsonb_typeof(_check_payload.payload) not in ('object', 'array') then
        raise exception using errcode = 'PA005',
            message = 'a payload must be a JSON object or array',
            detail  = format('It is %s.', coalesce('a JSON ' || jsonb_typeof(_check_payload.payload), 'null')),
            hint    = 'Wrap the value, as in {"value": ...}; leave payload out for an empty object.';
    elsif jsonb_typeof(_check_payload.headers) <> 'object' then
        raise exception using errcode = 'PA005',
            message = 'headers must be a JSON object',
            detail  = format('They are a JSON %s.', jsonb_typeof(_check_payload.headers)),
            hint    = 'Write them as {"name": "value"}; leave them out for none.';
    elsif v_bytes > _check_payload.max_bytes then
        raise exception using errcode = 'PA005',
            message = format('payload of %s bytes is too large', v_bytes),
            detail  = format('This queue takes up to %s bytes, headers included.', _check_payload.max_bytes),
            hint    = 'Store the data elsewhere and pass a reference, or raise the limit with '
                      'put_queue(queue => ..., max_payload_bytes => ...).';
    end if;
end;
$$;
comment on function almanac._check_payload(jsonb, jsonb, integer) is
    'Raises PA005 unless payload and headers can be taken.';
