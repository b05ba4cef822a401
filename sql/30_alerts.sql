-- 30 _raise_alert: something an operator should look at. One row each, however often it recurs. Those who raise are
-- ticks, which wait for nobody: if somebody is just changing the row, it is raised again soon enough.
-- Reads: alert. Writes: alert. Calls: clock.
create or replace function almanac._raise_alert(alert text, subject text, severity text, message text, hint text)
    returns void
    language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
begin
    perform from almanac.alert a
      where a.alert = _raise_alert.alert and a.subject = _raise_alert.subject
        for update skip locked;
    if not found and exists (select from almanac.alert a
                              where a.alert = _raise_alert.alert and a.subject = _raise_alert.subject) then
        return;
    end if;
    insert into almanac.alert as a (alert, subject, severity, message, hint, raised_at, seen_at)
    values (_raise_alert.alert, _raise_alert.subject, _raise_alert.severity, _raise_alert.message, _raise_alert.hint,
            almanac.clock(), almanac.clock())
    on conflict on constraint alert_pkey do update
       set severity = excluded.severity, message = excluded.message, hint = excluded.hint,
           raised_at = case when a.cleared_at is null then a.raised_at else excluded.raised_at end,
           seen_at = excluded.seen_at, occurrences = a.occurrences + 1, cleared_at = null;
end;
$$;
comment on function almanac._raise_alert(text, text, text, text, text) is
    'Raise an alert, or note that it is still so.';

-- 30 _clear_alert: it is not so any more. Costs a look-up where there is nothing to clear.
-- Writes: alert. Calls: clock.
create or replace function almanac._clear_alert(alert text, subject text)
    returns void
    language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
begin
    update almanac.alert a set cleared_at = almanac.clock()
     where a.alert = _clear_alert.alert and a.subject = _clear_alert.subject and a.cleared_at is null;
end;
$$;
comment on function almanac._clear_alert(text, text) is 'Clear an alert if it is raised.';
