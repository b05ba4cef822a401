-- 23 _caller: who called. Inside a security definer function current_user is the owner, and session_user alone is
-- the pool's login when an application uses set role.
create or replace function almanac._caller()
    returns text
    language sql stable
    return coalesce(nullif(current_setting('role'), 'none'), session_user::text);
comment on function almanac._caller() is 'The role on whose behalf the current function runs.';
