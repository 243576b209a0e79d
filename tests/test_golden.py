"""20 steps of small gpt2- and nano-shaped models: losses and parameters as before the script was written anew."""

from golden import differences, golden_run


def test_twenty_steps_are_those_of_the_earlier_script():
    assert differences(golden_run()) == []
