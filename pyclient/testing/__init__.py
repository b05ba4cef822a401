"""For the tests of an application: a database of its own, a clock that obeys, jobs run in place."""
