-- 12 cron_rule: a cron expression after parsing, stored with its schedule so that a tick parses nothing.
-- Bit n of a mask stands for the value n. Every mask is a bigint: no casts on the way to the next run.

create type almanac.cron_rule as (
    second_mask      bigint,
    minute_mask      bigint,
    hour_mask        bigint,
    dom_mask         bigint,
    dom_end_mask     bigint,
    dom_nearest_mask bigint,
    dom_last_weekday boolean,
    month_mask       bigint,
    dow_mask         bigint,
    dow_nth_mask     bigint,
    dow_last_mask    bigint,
    days_must_both   boolean,
    is_wildcard      boolean,
    every_us         bigint
);
comment on type almanac.cron_rule is
    'A parsed cron expression: one bit mask per field plus the day modifiers, or the period of an @every rule.';
comment on column almanac.cron_rule.second_mask is 'Seconds 0-59; only bit 0 in five-field rules.';
comment on column almanac.cron_rule.minute_mask is 'Minutes 0-59.';
comment on column almanac.cron_rule.hour_mask is 'Hours 0-23.';
comment on column almanac.cron_rule.dom_mask is 'Days of the month, bits 1-31.';
comment on column almanac.cron_rule.dom_end_mask is
    'L and L-n: bit 31 - n, so that shifting right by 31 - (length of the month) gives days of that month.';
comment on column almanac.cron_rule.dom_nearest_mask is 'nW: bit n, the weekday nearest to day n in the same month.';
comment on column almanac.cron_rule.dom_last_weekday is 'LW: the last Monday to Friday of the month.';
comment on column almanac.cron_rule.month_mask is 'Months, bits 1-12.';
comment on column almanac.cron_rule.dow_mask is 'Days of the week, bits 0 (Sunday) to 6.';
comment on column almanac.cron_rule.dow_nth_mask is 'n#k: bit 7 * (k - 1) + n, the k-th weekday n of the month.';
comment on column almanac.cron_rule.dow_last_mask is 'nL: bit n, the last weekday n of the month.';
comment on column almanac.cron_rule.days_must_both is
    'True where a day field starts with * or is ?: a day must match both day fields, otherwise either will do.';
comment on column almanac.cron_rule.is_wildcard is
    'True where the minute or the hour field starts with *: runs at every real instant whose local time matches.';
comment on column almanac.cron_rule.every_us is
    '@every: the period in microseconds of elapsed time; all masks are null then.';

-- One line of preview_cron.
create type almanac.previewed_run as (
    run_at     timestamptz,
    local_time timestamp,
    utc_time   timestamp,
    utc_offset text,
    rule_kind  text,
    note       text
);
comment on type almanac.previewed_run is
    'One run of a cron rule: when it is, what the clocks show, and what a change of the clocks does to it.';
comment on column almanac.previewed_run.run_at is 'The instant of the run.';
comment on column almanac.previewed_run.local_time is 'What a clock in the time zone of the rule shows then.';
comment on column almanac.previewed_run.utc_time is 'What a clock in UTC shows then.';
comment on column almanac.previewed_run.utc_offset is 'Local time minus UTC, as +02:00.';
comment on column almanac.previewed_run.rule_kind is
    'wildcard, fixed or elapsed: which of the three behaviours on the day the clocks change applies.';
comment on column almanac.previewed_run.note is 'Set where a gap or an overlap of local time affects this run.';
