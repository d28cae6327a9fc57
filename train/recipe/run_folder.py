"""The names of what a run leaves in its folder."""

RECIPE = "recipe.yaml"  # resolved: every key, every default
EXPORT = "export"  # the drafter in the recipe's first format
TARGET = "target"  # the target, where it was trained as well
REPORT = "acceptance.json"
PAGE = "report.html"
