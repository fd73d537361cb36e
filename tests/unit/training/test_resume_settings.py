"""What a resumed run may change."""

import pytest

from gyre_core.config import GyreConfig
from gyre_core.config.fields import list_fields
from gyre_core.training.resume import CHANGEABLE, check_same_run

FIELDS = [field.name for field in list_fields()]


def names_above(name):
    """The field and every section that it lies in."""
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts) + 1)}


def changed(name):
    """A default configuration in which one field, however deep, has a value that it had not."""
    config = GyreConfig()
    *path, last = name.split(".")
    sections = [config]
    for part in path:
        sections.append(getattr(sections[-1], part))
    value = sections.pop().model_copy(update={last: "another value"})
    for section, part in zip(reversed(sections), reversed(path), strict=True):
        value = section.model_copy(update={part: value})
    return value


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("name", FIELDS)
def test_each_setting_may_change_or_is_refused_by_name(name):
    if names_above(name) & set(CHANGEABLE):
        check_same_run(GyreConfig(), changed(name))
    else:
        with pytest.raises(ValueError, match=f"{name}: was .*, is now 'another value'"):
            check_same_run(GyreConfig(), changed(name))


def test_the_list_names_settings_that_exist():
    assert set(CHANGEABLE) <= set().union(*map(names_above, FIELDS))


def test_every_difference_is_told_and_none_is_none():
    check_same_run(GyreConfig(), GyreConfig())
    other = GyreConfig.model_validate({"learning": {"lr": 0.5, "kl_coef": 0.1}, "data": {"size": 7}})
    with pytest.raises(ValueError, match="other settings") as raised:
        check_same_run(GyreConfig(), other)
    assert str(raised.value).splitlines()[1:] == [
        "  data.size: was 6000, is now 7",
        "  learning.kl_coef: was 0.0, is now 0.1",
        "  learning.lr: was 1e-06, is now 0.5",
    ]
