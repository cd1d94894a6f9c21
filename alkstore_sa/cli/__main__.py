"""`python -m alkstore_sa.cli`."""

from alkstore_sa.cli import main

main(prog_name="alkstore")
