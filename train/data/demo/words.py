"""Word pools of the demo corpus: short common words, each a token or two."""

from __future__ import annotations

import random
from dataclasses import dataclass

WOMEN = (
    "Mia Anna Lucy Emma Nora Sara Julia Clara Alice Ruth Helen Maria Rosa Laura Eva Ella "
    "Grace Kate Jane Amy Lena Ida Vera Tina Nina Olga Paula Diana Sofia Ivy Hana Zoe Iris Joan"
).split()
MEN = (
    "Leo Tom Ben Max Sam Paul Peter David Omar Adam Felix Oscar Hugo Ivan Mark Luke Jack Simon "
    "Victor Daniel James Robert Henry Frank George Carl Eric Noah Amir Kenji Marco Pablo Theo Alan"
).split()
SURNAMES = (
    "Brown Green Hill Stone Wood Baker Cook Fisher King Young Lane West North Park Bell Cole "
    "Reed Ford Grant Hart Moss Page Rose Shaw Ward Webb York Marsh Field Brook"
).split()
CITIES = (
    "Paris London Rome Madrid Berlin Vienna Oslo Dublin Lisbon Prague Athens Cairo Tokyo Delhi "
    "Boston Chicago Denver Dallas Seattle Toronto Lima Quito Sydney Geneva Milan Porto Bergen "
    "Hamburg Lyon Turin"
).split()
JOBS = (
    "teacher doctor baker nurse painter driver farmer writer singer cook lawyer pilot waiter "
    "builder gardener designer engineer librarian tailor plumber clerk dentist actor fisher"
).split()
COUNTABLES = (
    "apples pears books pens coins cards shells stamps eggs cookies oranges lemons candles "
    "stickers buttons marbles plates cups flowers stones tickets pencils peaches plums beads "
    "rings toys balls hats socks"
).split()
PRODUCTS = (
    "lamp chair table desk clock mirror carpet kettle teapot blanket pillow basket bottle vase "
    "radio camera phone tablet keyboard printer heater fan bicycle helmet tent backpack wallet "
    "jacket scarf umbrella guitar piano ladder hammer shovel bucket towel curtain sofa shelf"
).split()
COLOURS = "red blue green black white yellow brown grey pink gold purple silver".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = ("January February March April May June July August September October November December").split()
PLACES = "market park library museum station school garden bakery harbour theatre office beach".split()
FRUITS = "apple pear plum lemon orange peach cherry banana grape mango".split()
ANIMALS = "dog cat horse rabbit parrot goat duck donkey hen pony".split()
FOODS = "soup bread cheese salad rice pasta cake fish beans honey".split()


@dataclass(frozen=True)
class Person:
    """A name and the pronouns that go with it."""

    name: str
    she: str
    her: str
    pool: tuple[str, ...]

    def other(self, rng: random.Random) -> str:
        """Another name that takes the same pronouns."""
        while True:
            name = rng.choice(self.pool)
            if name != self.name:
                return name


def person(rng: random.Random) -> Person:
    """Somebody drawn at random."""
    if rng.random() < 0.5:
        return Person(rng.choice(WOMEN), "she", "her", tuple(WOMEN))
    return Person(rng.choice(MEN), "he", "his", tuple(MEN))


def names(rng: random.Random, count: int) -> list[str]:
    """Different first names."""
    return rng.sample(WOMEN + MEN, count)
