"""Small problems with solutions, and a mistake for each: what `test_code` runs."""

from typing import NamedTuple


class Problem(NamedTuple):
    solution: str
    right: str
    """Occurs once in the solution."""
    wrong: str
    """Makes the solution wrong, in place of it."""
    tests: object


def pairs(*pairs, fn_name=""):
    tests = {"inputs": [given for given, _ in pairs], "outputs": [wanted for _, wanted in pairs]}
    return tests | ({"fn_name": fn_name} if fn_name else {})


READING = {
    "sum": Problem("print(sum(map(int, input().split())))", "sum", "max",
                   pairs(("1 2 3", "6"), ("-1 1", "0"))),
    "lines": Problem("import sys\nprint(len(sys.stdin.readlines()))", "readlines()", "read()",
                     pairs((["a", "bc"], "2"), ("a\n", "1"))),
    "mean": Problem("n = input()\nx = [*map(float, input().split())]\nprint(sum(x) / len(x))",
                    "len(x)", "2", pairs(("3\n1 2 2", "1.66666667"))),
    "primes": Problem("n = int(open('/dev/stdin').read())\n"
                      "print(*[p for p in range(2, n) if all(p % d for d in range(2, p))])",
                      "range(2, p)", "range(2, 4)", pairs(("12", "2 3 5 7 11"))),
    "depth": Problem("import sys, threading\nsys.setrecursionlimit(10**6)\n"
                     "threading.stack_size(64 << 20)\n"
                     "def f(n):\n    return n and 1 + f(n - 1)\n"
                     "t = threading.Thread(target=lambda: print(f(int(input()))))\n"
                     "t.start()\nt.join()", "n and 1", "n and 2", pairs(("20000", "20000"))),
    "big": Problem("print(int(input()) ** 3)", "3", "3.0",
                   pairs(("123456789012345678901", str(123456789012345678901**3)))),
}  # fmt: skip
CALLED = {
    "two_sum": Problem("def two_sum(numbers, target):\n    seen = {}\n"
                       "    for i, x in enumerate(numbers):\n        if target - x in seen:\n"
                       "            return [seen[target - x], i]\n        seen[x] = i",
                       "target - x in", "target in",
                       pairs(([[2, 7, 11], 9], [0, 1]), ([[3, 3], 6], [0, 1]), fn_name="two_sum")),
    "method": Problem("class Solution:\n    def twice(self, x):\n        return x * 2", "* 2",
                      "* 3", pairs(("[1]\n", "[1, 1]"), ('"a"', '"aa"'), fn_name="twice")),
    "tuple": Problem("def ends(x):\n    return x[0], x[-1]", "-1", "1",
                     pairs(([[1, 2, 3]], [1, 3]), fn_name="ends")),
    "table": Problem("def count(t):\n    return {c: t.count(c) for c in t}", "count(c)", "index(c)",
                     pairs((["aab"], {"a": 2, "b": 1}), fn_name="count")),
    "root": Problem("def root(x):\n    return x ** 0.5", "0.5", "0.4",
                    pairs(([2], 1.4142135), fn_name="root")),
    "truth": Problem("def is_even(n):\n    return n % 2 == 0", "== 0", "",
                     pairs(([3], False), ([4], True), fn_name="is_even")),
}  # fmt: skip
ASSERTED = {
    "factorial": Problem("def f(n):\n    return n * f(n - 1) if n else 1", "else 1", "else 0",
                         "assert f(0) == 1\nassert f(5) == 120"),
    "set": Problem("def common(a, b):\n    return set(a) & set(b)", "&", "|",
                   ["assert common([1, 2], [2, 3]) == {2}"]),
    "check": Problem("def add(a, b):\n    return a + b", "+", "-",
                     "def check(candidate):\n    assert candidate(2, 3) == 5"),
    "raises": Problem("def whole(t):\n    return int(t)", "int(t)", "float(t)",
                      "try:\n    whole('1.5')\n    assert False\nexcept ValueError:\n    pass"),
    "listed": Problem("print(input().upper())", "upper", "lower",
                      [{"input": "a\n", "output": "A\n", "type": "stdin"}]),
}  # fmt: skip
PROBLEMS = READING | CALLED | ASSERTED
