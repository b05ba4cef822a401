-- 21 _check_timezone: refuses what is not a zone of the database's own list. For writes: the view reads every file.
-- Trying the name is not enough: PostgreSQL takes UTC+5 (meaning UTC-5), PST, Berlin1 and Mars/Phobos5.
create or replace function almanac._check_timezone(timezone text)
    returns void
    language plpgsql stable strict parallel safe set search_path = pg_catalog, pg_temp
as $$
declare
    v_name text;
begin
    -- By its last part only for the hint, and not in Etc, where the signs are the other way round.
    select zone.name into v_name
      from pg_timezone_names as zone
     where length(_check_timezone.timezone) <= 100 -- asked once: a text of megabytes is compared with no name
       and (lower(zone.name collate "C") = lower(_check_timezone.timezone collate "C")
            or zone.name ~ '^(Africa|America|Antarctica|Asia|Atlantic|Australia|Europe|Indian|Pacific)/'
               and lower(substring(zone.name collate "C" from '[^/]*$'))
                   = replace(lower(_check_timezone.timezone collate "C"), ' ', '_'))
       and zone.name !~ '^posix' and zone.name not in ('localtime', 'Factory')
     order by zone.name = _check_timezone.timezone desc,
              lower(zone.name collate "C") = lower(_check_timezone.timezone collate "C") desc, zone.name
     limit 1;
    if v_name is distinct from _check_timezone.timezone then
        raise exception using errcode = 'PA008',
            message = format('time zone "%s" is not known', left(_check_timezone.timezone, 60)),
            detail  = 'It is not a name in pg_timezone_names; abbreviations, offsets and POSIX rules are not names.',
            hint    = case when v_name is null then 'Take a name like Europe/Paris, America/New_York or UTC.'
                           else format('Write it as %s.', v_name) end;
    end if;
end;
$$;
comment on function almanac._check_timezone(text) is
    'Raises PA008 unless the time zone is in pg_timezone_names without posix*, localtime, Factory. Slow: for writes.';

-- 21 _known_timezone: whether a name is one that _check_timezone is known to accept, without reading zone files.
-- The view costs tens of milliseconds, too much for a pure function. False means "ask the view": names that a newer
-- zone database brings still work, only slower. By area, the empty one for names without.
create or replace function almanac._known_timezone(timezone text)
    returns boolean
    language sql immutable parallel safe
    return coalesce(jsonb '{
        "": ["CET", "CST6CDT", "Cuba", "EET", "EST", "EST5EDT", "Egypt", "Eire", "GB", "GB-Eire", "GMT", "GMT+0",
            "GMT-0", "GMT0", "Greenwich", "HST", "Hongkong", "Iceland", "Iran", "Israel", "Jamaica", "Japan",
            "Kwajalein", "Libya", "MET", "MST", "MST7MDT", "NZ", "NZ-CHAT", "Navajo", "PRC", "PST8PDT", "Poland",
            "Portugal", "ROC", "ROK", "Singapore", "Turkey", "UCT", "UTC", "Universal", "W-SU", "WET", "Zulu"],
        "Africa": ["Abidjan", "Accra", "Addis_Ababa", "Algiers", "Asmara", "Asmera", "Bamako", "Bangui", "Banjul",
            "Bissau", "Blantyre", "Brazzaville", "Bujumbura", "Cairo", "Casablanca", "Ceuta", "Conakry", "Dakar",
            "Dar_es_Salaam", "Djibouti", "Douala", "El_Aaiun", "Freetown", "Gaborone", "Harare", "Johannesburg",
            "Juba", "Kampala", "Khartoum", "Kigali", "Kinshasa", "Lagos", "Libreville", "Lome", "Luanda", "Lubumbashi",
            "Lusaka", "Malabo", "Maputo", "Maseru", "Mbabane", "Mogadishu", "Monrovia", "Nairobi", "Ndjamena",
            "Niamey", "Nouakchott", "Ouagadougou", "Porto-Novo", "Sao_Tome", "Timbuktu", "Tripoli", "Tunis",
            "Windhoek"],
        "America": ["Adak", "Anchorage", "Anguilla", "Antigua", "Araguaina", "Argentina/Buenos_Aires",
            "Argentina/Catamarca", "Argentina/ComodRivadavia", "Argentina/Cordoba", "Argentina/Jujuy",
            "Argentina/La_Rioja", "Argentina/Mendoza", "Argentina/Rio_Gallegos", "Argentina/Salta",
            "Argentina/San_Juan", "Argentina/San_Luis", "Argentina/Tucuman", "Argentina/Ushuaia", "Aruba", "Asuncion",
            "Atikokan", "Atka", "Bahia", "Bahia_Banderas", "Barbados", "Belem", "Belize", "Blanc-Sablon", "Boa_Vista",
            "Bogota", "Boise", "Buenos_Aires", "Cambridge_Bay", "Campo_Grande", "Cancun", "Caracas", "Catamarca",
            "Cayenne", "Cayman", "Chicago", "Chihuahua", "Ciudad_Juarez", "Coral_Harbour", "Cordoba", "Costa_Rica",
            "Coyhaique", "Creston", "Cuiaba", "Curacao", "Danmarkshavn", "Dawson", "Dawson_Creek", "Denver", "Detroit",
            "Dominica", "Edmonton", "Eirunepe", "El_Salvador", "Ensenada", "Fort_Nelson", "Fort_Wayne", "Fortaleza",
            "Glace_Bay", "Godthab", "Goose_Bay", "Grand_Turk", "Grenada", "Guadeloupe", "Guatemala", "Guayaquil",
            "Guyana", "Halifax", "Havana", "Hermosillo", "Indiana/Indianapolis", "Indiana/Knox", "Indiana/Marengo",
            "Indiana/Petersburg", "Indiana/Tell_City", "Indiana/Vevay", "Indiana/Vincennes", "Indiana/Winamac",
            "Indianapolis", "Inuvik", "Iqaluit", "Jamaica", "Jujuy", "Juneau", "Kentucky/Louisville",
            "Kentucky/Monticello", "Knox_IN", "Kralendijk", "La_Paz", "Lima", "Los_Angeles", "Louisville",
            "Lower_Princes", "Maceio", "Managua", "Manaus", "Marigot", "Martinique", "Matamoros", "Mazatlan",
            "Mendoza", "Menominee", "Merida", "Metlakatla", "Mexico_City", "Miquelon", "Moncton", "Monterrey",
            "Montevideo", "Montreal", "Montserrat", "Nassau", "New_York", "Nipigon", "Nome", "Noronha",
            "North_Dakota/Beulah", "North_Dakota/Center", "North_Dakota/New_Salem", "Nuuk", "Ojinaga", "Panama",
            "Pangnirtung", "Paramaribo", "Phoenix", "Port-au-Prince", "Port_of_Spain", "Porto_Acre", "Porto_Velho",
            "Puerto_Rico", "Punta_Arenas", "Rainy_River", "Rankin_Inlet", "Recife", "Regina", "Resolute", "Rio_Branco",
            "Rosario", "Santa_Isabel", "Santarem", "Santiago", "Santo_Domingo", "Sao_Paulo", "Scoresbysund",
            "Shiprock", "Sitka", "St_Barthelemy", "St_Johns", "St_Kitts", "St_Lucia", "St_Thomas", "St_Vincent",
            "Swift_Current", "Tegucigalpa", "Thule", "Thunder_Bay", "Tijuana", "Toronto", "Tortola", "Vancouver",
            "Virgin", "Whitehorse", "Winnipeg", "Yakutat", "Yellowknife"],
        "Antarctica": ["Casey", "Davis", "DumontDUrville", "Macquarie", "Mawson", "McMurdo", "Palmer", "Rothera",
            "South_Pole", "Syowa", "Troll", "Vostok"],
        "Arctic": ["Longyearbyen"],
        "Asia": ["Aden", "Almaty", "Amman", "Anadyr", "Aqtau", "Aqtobe", "Ashgabat", "Ashkhabad", "Atyrau", "Baghdad",
            "Bahrain", "Baku", "Bangkok", "Barnaul", "Beirut", "Bishkek", "Brunei", "Calcutta", "Chita", "Choibalsan",
            "Chongqing", "Chungking", "Colombo", "Dacca", "Damascus", "Dhaka", "Dili", "Dubai", "Dushanbe",
            "Famagusta", "Gaza", "Harbin", "Hebron", "Ho_Chi_Minh", "Hong_Kong", "Hovd", "Irkutsk", "Istanbul",
            "Jakarta", "Jayapura", "Jerusalem", "Kabul", "Kamchatka", "Karachi", "Kashgar", "Kathmandu", "Katmandu",
            "Khandyga", "Kolkata", "Krasnoyarsk", "Kuala_Lumpur", "Kuching", "Kuwait", "Macao", "Macau", "Magadan",
            "Makassar", "Manila", "Muscat", "Nicosia", "Novokuznetsk", "Novosibirsk", "Omsk", "Oral", "Phnom_Penh",
            "Pontianak", "Pyongyang", "Qatar", "Qostanay", "Qyzylorda", "Rangoon", "Riyadh", "Saigon", "Sakhalin",
            "Samarkand", "Seoul", "Shanghai", "Singapore", "Srednekolymsk", "Taipei", "Tashkent", "Tbilisi", "Tehran",
            "Tel_Aviv", "Thimbu", "Thimphu", "Tokyo", "Tomsk", "Ujung_Pandang", "Ulaanbaatar", "Ulan_Bator", "Urumqi",
            "Ust-Nera", "Vientiane", "Vladivostok", "Yakutsk", "Yangon", "Yekaterinburg", "Yerevan"],
        "Atlantic": ["Azores", "Bermuda", "Canary", "Cape_Verde", "Faeroe", "Faroe", "Jan_Mayen", "Madeira",
            "Reykjavik", "South_Georgia", "St_Helena", "Stanley"],
        "Australia": ["ACT", "Adelaide", "Brisbane", "Broken_Hill", "Canberra", "Currie", "Darwin", "Eucla", "Hobart",
            "LHI", "Lindeman", "Lord_Howe", "Melbourne", "NSW", "North", "Perth", "Queensland", "South", "Sydney",
            "Tasmania", "Victoria", "West", "Yancowinna"],
        "Brazil": ["Acre", "DeNoronha", "East", "West"],
        "Canada": ["Atlantic", "Central", "Eastern", "Mountain", "Newfoundland", "Pacific", "Saskatchewan", "Yukon"],
        "Chile": ["Continental", "EasterIsland"],
        "Etc": ["GMT", "GMT+0", "GMT+1", "GMT+10", "GMT+11", "GMT+12", "GMT+2", "GMT+3", "GMT+4", "GMT+5", "GMT+6",
            "GMT+7", "GMT+8", "GMT+9", "GMT-0", "GMT-1", "GMT-10", "GMT-11", "GMT-12", "GMT-13", "GMT-14", "GMT-2",
            "GMT-3", "GMT-4", "GMT-5", "GMT-6", "GMT-7", "GMT-8", "GMT-9", "GMT0", "Greenwich", "UCT", "UTC",
            "Universal", "Zulu"],
        "Europe": ["Amsterdam", "Andorra", "Astrakhan", "Athens", "Belfast", "Belgrade", "Berlin", "Bratislava",
            "Brussels", "Bucharest", "Budapest", "Busingen", "Chisinau", "Copenhagen", "Dublin", "Gibraltar",
            "Guernsey", "Helsinki", "Isle_of_Man", "Istanbul", "Jersey", "Kaliningrad", "Kiev", "Kirov", "Kyiv",
            "Lisbon", "Ljubljana", "London", "Luxembourg", "Madrid", "Malta", "Mariehamn", "Minsk", "Monaco", "Moscow",
            "Nicosia", "Oslo", "Paris", "Podgorica", "Prague", "Riga", "Rome", "Samara", "San_Marino", "Sarajevo",
            "Saratov", "Simferopol", "Skopje", "Sofia", "Stockholm", "Tallinn", "Tirane", "Tiraspol", "Ulyanovsk",
            "Uzhgorod", "Vaduz", "Vatican", "Vienna", "Vilnius", "Volgograd", "Warsaw", "Zagreb", "Zaporozhye",
            "Zurich"],
        "Indian": ["Antananarivo", "Chagos", "Christmas", "Cocos", "Comoro", "Kerguelen", "Mahe", "Maldives",
            "Mauritius", "Mayotte", "Reunion"],
        "Mexico": ["BajaNorte", "BajaSur", "General"],
        "Pacific": ["Apia", "Auckland", "Bougainville", "Chatham", "Chuuk", "Easter", "Efate", "Enderbury", "Fakaofo",
            "Fiji", "Funafuti", "Galapagos", "Gambier", "Guadalcanal", "Guam", "Honolulu", "Johnston", "Kanton",
            "Kiritimati", "Kosrae", "Kwajalein", "Majuro", "Marquesas", "Midway", "Nauru", "Niue", "Norfolk", "Noumea",
            "Pago_Pago", "Palau", "Pitcairn", "Pohnpei", "Ponape", "Port_Moresby", "Rarotonga", "Saipan", "Samoa",
            "Tahiti", "Tarawa", "Tongatapu", "Truk", "Wake", "Wallis", "Yap"],
        "US": ["Alaska", "Aleutian", "Arizona", "Central", "East-Indiana", "Eastern", "Hawaii", "Indiana-Starke",
            "Michigan", "Mountain", "Pacific", "Samoa"]
    }' -> case when _known_timezone.timezone like '%/%' then split_part(_known_timezone.timezone, '/', 1) else '' end
       ? substr(_known_timezone.timezone, strpos(_known_timezone.timezone, '/') + 1), false);
comment on function almanac._known_timezone(text) is
    'Whether a time zone name is long established; a cheap first check.';

-- 21 _zone: the name under which "at time zone" finds the zone and not an abbreviation of the same spelling.
-- PostgreSQL looks for abbreviations first: its CET has no summer time, and what EST means depends on the session.
-- These are the zones that the zone database itself links the seven names to.
create or replace function almanac._zone(timezone text)
    returns text
    language sql immutable parallel safe
    return case _zone.timezone
        when 'CET' then 'Europe/Brussels' when 'MET' then 'Europe/Brussels' when 'EET' then 'Europe/Athens'
        when 'WET' then 'Europe/Lisbon' when 'EST' then 'America/Panama' when 'MST' then 'America/Phoenix'
        when 'HST' then 'Pacific/Honolulu' else _zone.timezone end;
comment on function almanac._zone(text) is 'A zone name that cannot be mistaken for an abbreviation.';

-- 21 _calendar_holds: whether an instant is finite and of the years 1 to 9999, with room to look around it.
create or replace function almanac._calendar_holds(instant timestamptz)
    returns boolean
    language sql immutable parallel safe
    return _calendar_holds.instant >= timestamptz '0001-01-02 00:00:00+00'
           and _calendar_holds.instant < timestamptz '9999-12-31 00:00:00+00';
comment on function almanac._calendar_holds(timestamptz) is 'Whether an instant is finite and of the years 1 to 9999.';

-- 21 _check_run_arguments: names what is wrong with the arguments of next_run and its relatives.
-- Calls: _calendar_holds, _check_timezone, _known_timezone.
create or replace function almanac._check_run_arguments(
    timezone text, instant timestamptz, dst_gap text, dst_overlap text, anchor timestamptz)
    returns void
    language plpgsql stable strict parallel safe set search_path = pg_catalog, pg_temp
as $$
begin
    if not almanac._known_timezone(timezone) then
        perform almanac._check_timezone(timezone);
    end if;
    if not (almanac._calendar_holds(instant) and almanac._calendar_holds(anchor)) then
        raise exception using errcode = '22023',
            message = 'instant is out of range',
            detail  = 'Cron is evaluated for finite instants of the years 1 to 9999.',
            hint    = 'Give an instant that a calendar holds, for example now().';
    end if;
    if dst_gap not in ('after', 'skip') then
        raise exception using errcode = '22023',
            message = format('dst_gap "%s" is not known', left(dst_gap, 40)),
            detail  = 'It says what becomes of a local time that the clocks leave out.',
            hint    = 'Use after (run at the first instant behind the gap) or skip.';
    end if;
    if dst_overlap not in ('first', 'second', 'both') then
        raise exception using errcode = '22023',
            message = format('dst_overlap "%s" is not known', left(dst_overlap, 40)),
            detail  = 'It says what becomes of a local time that the clocks show twice.',
            hint    = 'Use first, second or both.';
    end if;
end;
$$;
comment on function almanac._check_run_arguments(text, timestamptz, text, text, timestamptz) is
    'Raises PA008 for the time zone and 22023 for the other arguments of next_run and its relatives.';
