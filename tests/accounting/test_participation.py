import pytest

from accounting import ConfigError, Participation


@pytest.mark.parametrize("field", ["rounds", "max_participations", "min_separation"])
@pytest.mark.parametrize("value", [0, -1, True, 1.0, float("nan"), float("inf"), "3", None])
def test_only_whole_numbers_from_one(field, value):
    fields = {"rounds": 10, "max_participations": 1, "min_separation": 1} | {field: value}
    with pytest.raises(ConfigError, match=field):
        Participation(**fields)


def test_impossible_combination_says_what_would_be_possible():
    with pytest.raises(ConfigError, match="at most 5 fit into 1000") as error:
        Participation(1000, max_participations=10, min_separation=200)
    assert "max_participations of 5 or less, or min_separation of 111 or less" in str(error.value)
    Participation(1000, max_participations=5, min_separation=200)
    Participation(1000, max_participations=10, min_separation=111)


def test_more_participations_than_rounds_suggests_no_separation():
    with pytest.raises(ConfigError, match=r"Use max_participations of 3 or less\.$"):
        Participation(3, max_participations=4)


def test_tf_privacy_counts_the_rounds_in_between():
    converted = Participation.from_tf_privacy(rounds=9, max_participations=3, min_separation=3)
    assert converted == Participation(9, 3, 4)
    consecutive = Participation.from_tf_privacy(rounds=9, max_participations=9, min_separation=0)
    assert consecutive == Participation(9, 9, 1)
    with pytest.raises(ConfigError, match="min_separation"):
        Participation.from_tf_privacy(rounds=9, max_participations=3, min_separation=-1)


def test_patterns_are_all_admissible_ones():
    assert set(Participation(4, 2, 2).patterns()) == {
        *((i,) for i in range(4)), (0, 2), (0, 3), (1, 3)
    }  # fmt: skip
