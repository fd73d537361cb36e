"""The law of restarts, on histories of crashes."""

from gyre_core.training.crashes import Crashes, without_count


def history(*steps):
    """What is said after crashes at these steps, each count handed on by its tag."""
    tags = ["sums", "sums/a"]
    said = []
    for step in steps:
        crashes = Crashes.from_tags(tags).after(step)
        said.append("given up" if crashes.exhausted else crashes.pause)
        tags = [*without_count(tags), crashes.tag]
    assert tags[:2] == ["sums", "sums/a"]
    assert len(tags) == 3
    return said


def test_crashes_with_progress_are_answered_at_once_however_many():
    assert history(*range(10)) == [0.0] * 10


def test_the_third_crash_at_one_step_is_the_last_after_a_growing_pause():
    assert history(17, 17, 17) == [0.0, 10.0, "given up"]
    assert str(Crashes(2, 17).after(17)) == "crashed 3 times after step 17"


def test_steps_that_were_only_taken_again_are_no_progress():
    assert history(17, 12, 16) == [0.0, 10.0, "given up"]


def test_one_step_of_progress_ends_the_count():
    assert history(17, 17, 18, 18, 18) == [0.0, 10.0, 0.0, 10.0, "given up"]


def test_a_run_that_dies_before_its_first_step_is_given_up_too():
    assert history(0, 0, 0) == [0.0, 10.0, "given up"]
