"""Alembic's entry: runs on the connection that pyclient.migrate hands over, inside its transaction."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    version_table="migration",
    version_table_schema="almanac",
)
context.run_migrations()
