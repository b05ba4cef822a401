"""House rules, asked of the catalog and of the files: what a reader may rely on in every function and table."""

import re

import psycopg
import pytest

from pyclient import database, errors, files
from tests.sql import source

FUNCTIONS = source.functions()
ROLES = ["almanac_producer", "almanac_worker", "almanac_operator", "almanac_observer", "almanac_admin"]

by_function = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)


@pytest.fixture(scope="module")
def catalog(clone):
    """The installed schema, with the real clock."""
    with clone("almanac_live_template") as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        yield conn


def names(catalog, query: str, *params: object) -> list[str]:
    return sorted(str(name) for (name,) in catalog.execute(query, params or None))


# ── functions, in the catalog ───────────────────────────────────────────────────────────────────────────────────────


def test_every_function_of_the_files_is_installed_and_no_other(catalog):
    installed = names(catalog, "select proname from pg_proc where pronamespace = 'almanac'::regnamespace")
    assert installed == sorted(function.name for function in FUNCTIONS)


def test_one_name_has_one_signature(catalog):
    assert not names(
        catalog,
        "select proname from pg_proc where pronamespace = 'almanac'::regnamespace group by proname having count(*) > 1",
    )


def test_every_function_has_a_comment(catalog):
    assert not names(
        catalog,
        """select oid::regprocedure from pg_proc
            where pronamespace = 'almanac'::regnamespace and coalesce(obj_description(oid, 'pg_proc'), '') = ''""",
    )


def test_every_function_pins_its_search_path_or_has_a_parsed_body(catalog):
    """Procedures excepted: one that commits may not have settings of its own. It is private and qualifies its calls."""
    assert not names(
        catalog,
        """select oid::regprocedure from pg_proc
            where pronamespace = 'almanac'::regnamespace and prosqlbody is null and prokind <> 'p'
              and not coalesce(proconfig, '{}') @> array['search_path=pg_catalog, pg_temp']""",
    )


def test_no_function_is_open_to_public(catalog):
    assert not names(
        catalog,
        """select oid::regprocedure
             from pg_proc cross join aclexplode(coalesce(proacl, acldefault('f', proowner))) as acl
            where pronamespace = 'almanac'::regnamespace and acl.grantee = 0""",
    )


def test_private_functions_are_granted_to_nobody(catalog):
    assert not names(
        catalog,
        r"""select oid::regprocedure
             from pg_proc cross join aclexplode(coalesce(proacl, acldefault('f', proowner))) as acl
            where pronamespace = 'almanac'::regnamespace and proname like '\_%' and acl.grantee <> proowner""",
    )


def test_the_roles_hold_no_privilege_on_a_table(catalog):
    assert not names(
        catalog,
        """select format('%s: %s to %s', pg_class.oid::regclass, acl.privilege_type,
                         coalesce(pg_roles.rolname, 'public'))
             from pg_class cross join aclexplode(relacl) as acl left join pg_roles on pg_roles.oid = acl.grantee
            where relnamespace = 'almanac'::regnamespace and acl.grantee <> relowner
              and not (relkind = 'v' and acl.privilege_type = 'SELECT' and acl.grantee <> 0)""",
    )


def test_every_plpgsql_function_passes_plpgsql_check(clone):
    with clone("almanac_live_template") as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        if not conn.execute("select name from pg_available_extensions where name = 'plpgsql_check'").fetchall():
            pytest.skip("plpgsql_check is not available on this server")
        conn.execute("create extension plpgsql_check")
        found = conn.execute(
            r"""
            select format('%s line %s: %s %s', function.oid::regprocedure, finding.lineno, finding.level,
                          concat_ws(' / ', finding.message, finding.detail, finding.hint))
              from pg_proc as function
              left join lateral (select tgrelid from pg_trigger where tgfoid = function.oid limit 1) as hook on true
             cross join plpgsql_check_function_tb(
                       function.oid, coalesce(hook.tgrelid, 0), fatal_errors => false, other_warnings => true,
                       extra_warnings => true, security_warnings => true) as finding
             where pronamespace = 'almanac'::regnamespace
               and prolang = (select oid from pg_language where lanname = 'plpgsql')
               and (prorettype <> 'trigger'::regtype or hook.tgrelid is not null)
               -- A literal assigned to a variable of another type than text is no mistake: v_days int[] := '{}'.
               and finding.sqlstate is distinct from '42804'
               -- pg_cron need not be there.
               and finding.message !~ '"cron(\.\w+)?" does not exist'
            """
        ).fetchall()
    assert not [line for (line,) in found]


# ── tables, in the catalog ──────────────────────────────────────────────────────────────────────────────────────────


def test_every_table_view_and_type_has_a_comment(catalog):
    assert not names(
        catalog,
        """select oid::regclass from pg_class
            where relnamespace = 'almanac'::regnamespace and relkind in ('r', 'p', 'v', 'm', 'c')
              and not relispartition
              and coalesce(obj_description(oid, 'pg_class'), obj_description(reltype, 'pg_type'), '') = ''""",
    )


def test_every_column_of_a_table_has_a_comment(catalog):
    assert not names(
        catalog,
        """select format('%s.%s', attrelid::regclass, attname)
             from pg_attribute join pg_class on pg_class.oid = attrelid
            where relnamespace = 'almanac'::regnamespace and relkind in ('r', 'p') and not relispartition
              and attnum > 0 and not attisdropped and coalesce(col_description(attrelid, attnum), '') = ''""",
    )


def test_constraints_are_named_for_what_holds(catalog):
    """`<table>_<what holds>`; `<table>_pkey` for a primary key. What the server would name by itself ends otherwise."""
    found = catalog.execute(
        """select relname, conname, contype
             from pg_constraint join pg_class on pg_class.oid = conrelid
            where connamespace = 'almanac'::regnamespace and not relispartition and contype <> 'n'"""
    ).fetchall()
    wrong = [
        name
        for table, name, kind in found
        if not (
            name == f"{table}_pkey"
            if kind == "p"
            else re.fullmatch(rf"{table}_\w+", name) and not re.search(r"_(check|key|fkey|excl)\d*$", name)
        )
    ]
    assert not wrong


def test_indexes_are_named_after_who_uses_them(catalog):
    """`<table>_<who uses it>_idx`, where the index is not the tool of a constraint."""
    found = catalog.execute(
        """select owner.relname, index.relname
             from pg_index
             join pg_class as index on index.oid = indexrelid
             join pg_class as owner on owner.oid = indrelid
            where index.relnamespace = 'almanac'::regnamespace and not owner.relispartition
              and not exists (select from pg_constraint where conindid = indexrelid)"""
    ).fetchall()
    assert not [name for table, name in found if not re.fullmatch(rf"{table}_\w+_idx", name)]


def test_no_index_is_in_the_order_of_a_language(catalog):
    """That order changes with the operating system, and then an index holds twice what it should hold once."""
    assert not names(
        catalog,
        """select i.indexrelid::regclass
             from pg_index i join pg_class c on c.oid = i.indexrelid
            where c.relnamespace = 'almanac'::regnamespace
              and exists (select from unnest(i.indcollation) as used (oid)
                           where used.oid not in (0, 'pg_catalog."C"'::regcollation))""",
    )


# ── the files ───────────────────────────────────────────────────────────────────────────────────────────────────────


@by_function
def test_a_function_has_a_header_with_its_number_and_name(function):
    assert function.header.startswith(f"-- {function.number:02} {function.name}: "), function.file


@pytest.fixture(scope="module")
def relations(catalog):
    return set(
        names(
            catalog,
            """select relname from pg_class
                where relnamespace = 'almanac'::regnamespace and relkind in ('r', 'p', 'v', 'S')""",
        )
    )


@by_function
def test_a_header_says_what_the_function_touches(function, relations):
    known = {other.name for other in FUNCTIONS}
    declared, actual = function.declared(), function.actual(relations, known)
    for kind in ("reads", "writes", "calls"):
        stated, found = getattr(declared, kind), getattr(actual, kind)
        # Dynamic SQL hides names in strings: a header may state those too.
        allowed = found | {name for name in stated if re.search(rf"\b{name}\b", function.strings)}
        if kind == "reads":  # a table that is written may be stated as read as well, or not
            found, allowed = found - actual.writes, allowed | actual.writes
        assert found <= stated <= allowed, f"{function.file}: {function.name} {kind} {sorted(found)}"


@by_function
def test_calls_go_down_in_number_only(function, relations):
    number = {other.name: other.number for other in FUNCTIONS}
    called = function.actual(relations, set(number)).calls
    assert not [name for name in called if number[name] > function.number]


@by_function
def test_only_clock_asks_the_time(function):
    asks = re.compile(
        r"\b(now\s*\(|clock_timestamp|statement_timestamp|transaction_timestamp|timeofday|"
        r"current_timestamp|current_date|current_time|localtimestamp|localtime)\b",
        re.IGNORECASE,
    )
    if function.name != "clock":
        assert not asks.search(function.code)


def test_only_the_heartbeat_names_pg_cron():
    offenders = [
        file.name
        for file in files.sql_files()
        if file.number // 10 != 7
        and re.search(r"\bcron\.\w|\bpg_cron\b", source.without_strings(source.without_comments(file.text())))
    ]
    assert not offenders


def test_every_error_code_raised_has_an_exception():
    raised = {
        code for file in files.sql_files() for code in re.findall(r"'(PA\d\d\d)'", source.without_comments(file.text()))
    }
    assert raised <= set(errors.BY_SQLSTATE)


def test_the_sql_readme_lists_every_error_code():
    listed = re.findall(r"^\| `(PA\d\d\d)`", (files.folder("sql") / "README.md").read_text(), re.MULTILINE)
    assert listed == sorted(errors.BY_SQLSTATE)


def test_no_constant_depends_on_what_a_backslash_means_to_the_session():
    """standard_conforming_strings is the session's: a body is read where it is called, a table where it is made."""
    constant = re.compile(r"[Ee]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'")
    found = [
        f"{file.name}: {text}"
        for file in files.sql_files()
        for text in constant.findall(source.without_comments(file.text()))
        if text.startswith("'") and "\\" in text
    ]
    assert not found


def test_nothing_waits_for_a_lock_that_any_login_could_hold(catalog):
    """Advisory locks have public keys: whoever can connect can take them, and stop what waits for one."""
    assert not names(
        catalog,
        "select oid::regprocedure from pg_proc where pronamespace = 'almanac'::regnamespace and prosrc ~ 'advisory'",
    )
    assert not [path for path in files.PACKAGE.rglob("*.py") if "pg_advisory" in path.read_text(encoding="utf-8")]


def test_lines_fit():
    long = [
        f"{file.name}:{number}"
        for file in files.sql_files()
        for number, line in enumerate(file.text().splitlines(), 1)
        if len(line) > 120
    ]
    assert not long


# ── the calls of pyclient ───────────────────────────────────────────────────────────────────────────────────────────

CALLS = [value for value in vars(database).values() if isinstance(value, database.Call)]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_a_call_has_the_arguments_and_rows_of_its_function(call, catalog):
    row = catalog.execute(
        """select pronargs - pronargdefaults, (coalesce(proargnames, '{}'))[1:pronargs], proretset, prorettype,
                  coalesce((select array_agg(attname::text) from pg_attribute join pg_type on typrelid = attrelid
                             where pg_type.oid = prorettype and attnum > 0 and not attisdropped),
                           proargnames[pronargs + 1:])
             from pg_proc where pronamespace = 'almanac'::regnamespace and proname = %s""",
        [call.name],
    ).fetchone()
    assert row, "no such function"
    required, arguments, returns_set, _, columns = row
    assert set(call.adapters) <= set(arguments)
    assert call.required >= set(arguments[:required])
    assert call.rows.many == returns_set
    assert set(call.rows.fields) <= set(columns or ())
