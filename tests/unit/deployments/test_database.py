"""The database URL: in which form it is taken, and that its password is shown to nobody."""

import pytest

from deployments.database import check_database, hide_password, server_url


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+asyncpg"])
def test_the_usual_schemes_of_postgresql_are_taken(scheme):
    assert server_url(f"{scheme}://me:secret@host:5432/db") == "postgresql+asyncpg://me:secret@host:5432/db"


@pytest.mark.parametrize("url", ["sqlite:///file.db", "mysql://me:secret@host/db", "host/db"])
def test_other_databases_are_refused_without_their_password(url):
    with pytest.raises(ValueError, match="is not of PostgreSQL") as error:
        server_url(url)
    assert "secret" not in str(error.value)


def test_a_password_is_hidden_also_as_it_is_sent():
    url = "postgresql://me:p%40ss-word@host/db"
    text = f"cannot connect to {server_url(url)} as me with p@ss-word"
    assert hide_password(text, url) == "cannot connect to postgresql://***@host/db as me with ***"
    assert hide_password("nothing to hide", None) == "nothing to hide"


def test_a_database_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"the database postgresql://\*\*\*@127.0.0.1:9/db does not let us in"):
        check_database("postgresql://me:secret@127.0.0.1:9/db")
