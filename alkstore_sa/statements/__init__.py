"""Builders: each returns one Core statement for both databases and executes nothing.

Values are bound by name when the statement runs, so that a statement is built once and kept. A writing statement begins with INSERT,
UPDATE or DELETE (on SQLite a leading WITH would escape the caller's transaction), answers come from RETURNING, and a subselect on the
job table is aliased, since an UPDATE or DELETE of that table would otherwise swallow its FROM.
"""
