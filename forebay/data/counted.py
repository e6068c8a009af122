"""Numbers of things, in words."""


def counted(number: int, thing: str) -> str:
    """`1 row`, `1,234 rows`."""
    return f"{number:,} {thing}" + "s" * (number != 1)
