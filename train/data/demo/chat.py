"""Open chat about hobbies, dishes, cities, subjects and pets.

Each topic carries a few facts, and the answers are put together from them, so
an answer follows from the user's topic and question while its wording is free.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from .shapes import Exchange, Style, Thread, capital
from .words import CITIES, DAYS, names

Facts = dict[str, str]


def _facts(heads: str, rows: str) -> list[Facts]:
    keys = heads.split()
    return [dict(zip(keys, (cell.strip() for cell in row.split("/")), strict=True)) for row in rows.strip().split("\n")]


HOBBIES = _facts(
    "topic gear joy step",
    """
painting / a brush and some cheap colours / it makes you look closely at the world / paint one cup every day for a week
chess / a small board / it trains a patient mind / learn how each piece moves and play short games
gardening / a few pots and good soil / you can eat what you grow / start with herbs near a sunny window
running / a pair of good shoes / it clears the head / run slowly for ten minutes, three times a week
swimming / a cap and goggles / it is easy on the knees / take one lesson to learn how to breathe
cooking / a sharp knife and one good pan / it brings people to the table / learn three simple dishes by heart
knitting / two needles and thick wool / it keeps the hands calm / make a plain scarf before anything else
cycling / a bike and a helmet / you see more than from a car / ride a short loop after work
photography / the camera in your phone / you learn to notice light / take one picture of the same place every day
reading / a library card / it lets you live many lives / read ten pages before bed
hiking / strong boots and a map / the view pays for the climb / choose a short trail with a friend
singing / nothing but your voice / it lifts the mood / sing along with slow songs at home
drawing / a pencil and plain paper / you can do it anywhere / draw simple shapes and then real things
baking / a scale and a warm oven / the whole house smells good / bake the same bread until it works
fishing / a simple rod / it is quiet by the water / ask someone local where the fish are
dancing / comfortable shoes / it is exercise that feels like a party / join a class for beginners
""",
)
DISHES = _facts(
    "topic main side tip",
    """
tomato soup / ripe tomatoes, an onion and a little cream / toast with cheese / cook the onion slowly until it is sweet
fried rice / cold rice, eggs and peas / a few slices of cucumber / keep the pan very hot
pasta with garlic / pasta, garlic and olive oil / a green salad / save a cup of the cooking water
bean stew / beans, carrots and a bay leaf / dark bread / let it rest for an hour before you serve it
potato salad / potatoes, a spoon of mustard and herbs / cold chicken / dress the potatoes while they are warm
apple cake / apples, butter and flour / whipped cream / cut the apples thin
pancakes / flour, milk and two eggs / berries and honey / wait ten minutes before you fry the first one
vegetable curry / cauliflower, peas and coconut milk / plain rice / toast the spices before you add the rest
fish pie / white fish, leeks and mashed potato / green beans / do not cook the fish too long
omelette / three eggs and some butter / a small salad / take it off the heat while it is still soft
lentil soup / red lentils, cumin and lemon / warm flat bread / add the lemon at the very end
mushroom toast / mushrooms, thyme and good bread / a fried egg / do not crowd the pan
""",
)
CITY_FACTS = _facts(
    "topic sight eat season",
    """
Paris / the river banks and the old museums / fresh bread and soft cheese / spring
London / the parks and the big markets / a warm pie in a pub / early summer
Rome / the ruins and the small squares / thin pizza and good coffee / autumn
Madrid / the art museums and the lively streets / small plates of ham and olives / spring
Berlin / the galleries and the lakes / dumplings and dark bread / summer
Vienna / the palaces and the music halls / chocolate cake / winter
Oslo / the harbour and the forest paths / fresh fish / summer
Dublin / the green parks and the old library / stew with potatoes / late spring
Lisbon / the hills and the yellow trams / custard cakes and grilled fish / autumn
Prague / the bridges and the castle / soup and dumplings / spring
Athens / the temples above the town / salad with white cheese / autumn
Cairo / the pyramids and the busy markets / beans with warm bread / winter
Tokyo / the quiet temples and the bright streets / noodles in broth / spring
Sydney / the harbour and the beaches / fresh fruit and fish / autumn
Boston / the old streets and the river path / clam soup / autumn
Lima / the cliffs above the sea / raw fish with lime / summer
""",
)
SUBJECTS = _facts(
    "topic idea why practice",
    """
gravity / heavy things pull on each other, and the earth pulls on us / it keeps the moon near the earth / drop two stones and watch them land together
fractions / a whole is cut into equal parts and we count some of them / we need them to share and to measure / cut an apple into four parts and name them
photosynthesis / plants use light to turn air and water into sugar / it gives us food and fresh air / keep one plant in the dark and one in the sun
rain / warm air carries water up, where it cools and falls as drops / it fills the rivers and feeds the fields / watch a cold lid over hot water
electricity / tiny charges move along a wire and carry energy / it runs our lights and machines / build a small lamp with a battery
interest / a bank pays you a little for the money you leave with it / savings grow faster the longer you wait / work out one year with a round sum
the water cycle / water rises from the sea, forms clouds and comes back as rain / no drop is ever really lost / draw it with arrows on one page
sound / something shakes the air, and the ear feels the waves / it lets us talk and hear music / touch a drum while it plays
magnets / each one has two ends, and equal ends push each other away / motors and phones depend on them / test which things in the kitchen stick
the seasons / the earth leans, so each half gets more sun for part of the year / farmers plan by them / shine a lamp on a tilted ball
vaccines / they show the body a harmless piece of a germ so it can learn / they stop many people from getting ill / explain it to a friend in two sentences
rust / iron, water and air slowly make a new brown stuff / bridges need paint because of it / leave one wet nail and one dry nail on a plate
verbs / they say what someone does or what happens / no sentence works without one / find every verb on one page of a book
ratios / they compare two amounts / recipes and maps use them all the time / mix juice with one part syrup and five parts water
""",
)
PETS = _facts(
    "topic need like mind",
    """
dog / two long walks a day / company and games / it costs time and money for many years
cat / a clean box and a place to climb / naps in the sun / it may scratch the sofa
rabbit / room to run and plenty of hay / another rabbit / it does not like to be carried
parrot / a large cage and a lot of talk / puzzles and fruit / it can live for fifty years
hamster / a wheel and deep bedding / seeds and quiet days / it is awake at night
goldfish / a wide tank and clean water / plants to hide in / a small bowl is not enough
horse / a field, a stable and daily care / other horses / it is a lot of work in winter
turtle / a warm lamp and clean water / slow mornings in the light / it grows larger than people think
""",
)

SELF = [
    {
        "topic": "you",
        "skill": "small sums, short functions, JSON, tables, edits and a little talk",
        "size": "a tiny language model, trained on made-up texts",
        "limit": "I know very little about the world",
    }
]


@dataclass(frozen=True)
class Kind:
    """A kind of topic.  A question names, before its bar, the fact it is about; "" is any."""

    topics: list[Facts]
    questions: tuple[str, ...]
    openers: tuple[str, ...]
    facts: dict[str, tuple[str, ...]]
    closers: tuple[str, ...]


KINDS = {
    "hobby": Kind(
        HOBBIES,
        (
            "step|How do I start with {topic}?",
            "step|I want to try {topic}. Any advice?",
            "joy|Is {topic} a good hobby for me?",
            "gear|What do I need for {topic}?",
            "joy|Why do people like {topic}?",
            "step|Can you give me a plan to learn {topic}?",
            "|What do you think about {topic}?",
            "gear|What should I buy for {topic}?",
            "|My friend {name} loves {topic}. Should I try it too?",
            "|I have free time on {day}. Is {topic} a good idea?",
        ),
        (
            "{Topic} is a lovely hobby.",
            "That is a good choice.",
            "I think {topic} is worth a try.",
            "Many people enjoy {topic}.",
            "You can start with {topic} at any age.",
        ),
        {
            "gear": ("All you need is {gear}.", "To begin, get {gear}."),
            "joy": ("The best part is that {joy}.", "People like it because {joy}."),
            "step": ("A good first step: {step}.", "My advice is simple: {step}."),
        },
        (
            "Do not worry about being good at it yet.",
            "After a month you will see a change.",
            "Have fun with it.",
            "Small steps are enough.",
            "A friend can keep you going.",
            "Write down what you learn.",
        ),
    ),
    "dish": Kind(
        DISHES,
        (
            "|How do I make {topic}?",
            "main|What goes into {topic}?",
            "tip|I want to cook {topic} on {day}. Any tips?",
            "side|What should I serve with {topic}?",
            "tip|Is {topic} hard to make?",
            "|{name} is coming for dinner. Is {topic} a good idea?",
            "|Tell me about {topic}.",
            "tip|What is the secret of good {topic}?",
            "main|What do I need to buy for {topic}?",
            "side|What goes well with {topic}?",
        ),
        (
            "{Topic} is easier than it looks.",
            "Good choice.",
            "I like {topic} for a simple meal.",
            "{Topic} always works.",
        ),
        {
            "main": ("You need {main}.", "The main parts are {main}."),
            "side": ("Serve it with {side}.", "It goes well with {side}."),
            "tip": ("One tip: {tip}.", "The trick is simple: {tip}."),
        },
        (
            "Taste it before you add more salt.",
            "Enjoy your meal.",
            "It is even better the next day.",
            "Half an hour should be enough.",
            "Put everything on the table before you start.",
            "Make a little more than you need.",
        ),
    ),
    "city": Kind(
        CITY_FACTS,
        (
            "sight|What should I see in {topic}?",
            "sight|I am going to {topic} with {name}. What can we do?",
            "season|When is the best time to visit {topic}?",
            "eat|What do people eat in {topic}?",
            "|Is {topic} worth a trip?",
            "sight|Plan a day in {topic} for me.",
            "sight|I have two days in {topic}. Any ideas?",
            "|Should I visit {topic} or {other}?",
            "|Tell me something about {topic}.",
            "season|When should I go to {topic}?",
            "eat|Where does one eat well in {topic}?",
        ),
        (
            "{topic} is a wonderful place.",
            "I would gladly go to {topic}.",
            "{topic} has a lot to offer.",
            "A trip to {topic} is a good idea.",
        ),
        {
            "sight": ("Do not miss {sight}.", "Start with {sight}."),
            "eat": ("Try {eat} while you are there.", "For lunch, have {eat}."),
            "season": (
                "The best season is {season}.",
                "I would go in {season}.",
                "In {season} the weather is at its best.",
            ),
        },
        (
            "Wear good shoes, because you will walk a lot.",
            "Have a nice trip.",
            "Leave some time to get lost.",
            "Book your room early.",
            "Talk to the people who live there.",
            "A small bag is enough.",
        ),
    ),
    "subject": Kind(
        SUBJECTS,
        (
            "idea|Can you explain {topic}?",
            "idea|What is the idea behind {topic}?",
            "idea|I do not understand {topic}.",
            "idea|Explain {topic} to a child.",
            "why|Why does {topic} matter?",
            "|My teacher asked about {topic}. What should I say?",
            "practice|I have a test on {day} about {topic}. Can you help?",
            "practice|How can I study {topic}?",
            "idea|{name} asked me about {topic}. How do I explain it?",
            "why|Why should I care about {topic}?",
        ),
        (
            "Let me help you with {topic}.",
            "{Topic}: that can be put in simple words.",
            "That is a common question.",
            "Here is the short version.",
        ),
        {
            "idea": ("The idea is this: {idea}.", "In simple words, {idea}."),
            "why": ("It matters because {why}.", "This is why we care: {why}."),
            "practice": ("Here is a good exercise: {practice}.", "To remember it, try this: {practice}."),
        },
        (
            "Ask again if a part is not clear.",
            "Read it twice and you will know it.",
            "That is really all there is to it.",
            "Good luck with your studies.",
            "A picture in your notes can help.",
            "Tell it to somebody else in your own words.",
        ),
    ),
    "pet": Kind(
        PETS,
        (
            "|Should I get a {topic}?",
            "need|What does a {topic} need?",
            "mind|Is a {topic} a good pet for a child?",
            "need|How do I take care of a {topic}?",
            "|Tell me about life with a {topic}.",
            "|{name} wants a {topic}. What do you think?",
            "mind|We will get a {topic} on {day}. What should we know?",
            "|Is a {topic} better than a {other_pet}?",
            "like|What does a {topic} like?",
            "like|How do I make a {topic} happy?",
        ),
        (
            "A {topic} can be a great friend.",
            "Think about it for a while.",
            "A {topic} is a good pet for the right home.",
            "That depends on your days.",
        ),
        {
            "need": ("A {topic} needs {need}.", "Give it {need}."),
            "like": ("It likes {like}.", "What makes it happy: {like}."),
            "mind": ("Keep in mind that {mind}.", "You should know that {mind}."),
        },
        (
            "Ask a vet if you are not sure.",
            "Love and time matter most.",
            "Visit one before you decide.",
            "Make sure everyone at home agrees.",
            "A good book about pets will help.",
            "Talk to somebody who has one.",
        ),
    ),
    "self": Kind(
        SELF,
        (
            "size|Who are you?",
            "skill|What can you do?",
            "|Tell me about yourself.",
            "limit|Do you know everything?",
            "size|Are you a person?",
            "|How are you today?",
            "skill|Can you help me?",
            "skill|{name} says you can help me. With what?",
            "limit|Can I trust you?",
            "|Nice to meet you. Who am I talking to?",
        ),
        ("Thanks for asking.", "That is a fair question.", "I am glad you ask.", "I am here to help."),
        {
            "skill": ("I can help with {skill}.", "My skills are {skill}."),
            "size": ("I am {size}.", "You are talking to {size}."),
            "limit": ("To be honest, {limit}.", "Please remember that {limit}."),
        },
        (
            "Ask me anything you like.",
            "Just send me a task.",
            "What shall we do first?",
            "Check my answers before you use them.",
            "I will do my best.",
        ),
    ),
}
MEETINGS = (
    "Hi! ",
    "Hello. ",
    "Good morning. ",
    "Hey! ",
    "Good evening! ",
    "I have a question. ",
    "Quick question: ",
    "I am {name}. ",
    "My name is {name} and I live in {city}. ",
    "It is raining in {city} today. ",
    "It is {day} and I am bored. ",
    "I need your help. ",
    "",
    "",
    "",
    "",
    "",
    "",
)
GREETINGS = ("Hello!", "Hi {name}!", "Nice to meet you, {name}.")
CHEERS = ("Happy to help!", "What a great question!", "Oh, I love this topic!")
QUESTIONS = (
    "What do you like most about it?",
    "Would you like to know more?",
    "Have you tried it before?",
    "Shall I tell you more?",
)
SHARES = ("hobby", "dish", "city", "subject", "pet") * 2 + ("self",)
FOLLOW = (
    "And what about {topic}?",
    "Thanks. How about {topic}?",
    "What if I choose {topic} instead?",
    "Can you say the same about {topic}?",
    "Now tell me about {topic}.",
)
MORE = (
    "Can you tell me more?",
    "Anything else?",
    "Do you have another tip?",
    "Thanks! What else should I know?",
    "Go on, please.",
)


def _facts_told(rng: random.Random, kind: Kind, focus: str, told: set[str], wanted: int) -> list[str]:
    """Facts not told yet, the one asked about first."""
    order = sorted(kind.facts)
    rng.shuffle(order)
    order.sort(key=lambda fact: (fact in told, fact != focus))
    told.update(order[:wanted])
    return [rng.choice(kind.facts[fact]) for fact in order[:wanted]]


def _answer(
    rng: random.Random, kind: Kind, slots: dict[str, str], style: Style, focus: str, told: set[str], greeting: str = ""
) -> str:
    """A greeting or opener, one to three facts and at times a closer, as the style asks."""
    more = bool(told)
    wanted = 1 if style.brief or more else rng.choice((1, 2, 2, 3))
    parts = [] if more and rng.random() < 0.5 else [rng.choice(kind.openers)]
    parts += _facts_told(rng, kind, focus, told, wanted)
    if not style.brief:
        parts += rng.sample(kind.closers, rng.choice((1, 2)) if more else rng.choice((0, 1, 1)))
    parts = (
        [greeting] * bool(greeting)
        + [rng.choice(CHEERS)] * style.cheerful
        + parts
        + [rng.choice(QUESTIONS)] * style.curious
    )
    return " ".join(capital(part.format(**slots)) for part in parts)


def _slots(rng: random.Random, facts: Facts) -> dict[str, str]:
    other = rng.choice([city for city in CITIES if city != facts["topic"]])
    other_pet = rng.choice([pet["topic"] for pet in PETS if pet["topic"] != facts["topic"]])
    return {
        **facts,
        "Topic": capital(facts["topic"]),
        "name": names(rng, 1)[0],
        "day": rng.choice(DAYS),
        "other": other,
        "other_pet": other_pet,
    }


def _meeting(rng: random.Random, slots: dict[str, str]) -> tuple[str, str]:
    """Words before the question, and the greeting they call for."""
    me = names(rng, 1)[0]
    meeting = rng.choice(MEETINGS).format(name=me, city=slots["other"], day=slots["day"])
    if me in meeting:
        return meeting, rng.choice(GREETINGS[1:]).format(name=me)
    return meeting, GREETINGS[0] if meeting.startswith(("H", "Good")) else ""


def start(rng: random.Random, style: Style) -> Thread:
    """A question about a topic, and follow-ups about it or one like it."""
    kind = KINDS[rng.choice(SHARES)]
    slots = _slots(rng, rng.choice(kind.topics))
    told: set[str] = set()
    meeting, greeting = _meeting(rng, slots)
    focus, question = rng.choice(kind.questions).split("|")
    first = Exchange(meeting + question.format(**slots), _answer(rng, kind, slots, style, focus, told, greeting))

    def follow() -> Exchange:
        nonlocal slots
        others = [facts for facts in kind.topics if facts["topic"] != slots["topic"]]
        if not others or rng.random() < 0.35:
            return Exchange(rng.choice(MORE), _answer(rng, kind, slots, style, "", told))
        slots = _slots(rng, rng.choice(others))
        told.clear()
        topic = f"a {slots['topic']}" if kind.topics is PETS else slots["topic"]
        return Exchange(rng.choice(FOLLOW).format(topic=topic), _answer(rng, kind, slots, style, focus, told))

    return first, follow


def is_right(expected: object, answer: str) -> bool:
    """Open chat has no right answer; this only asks for whole sentences."""
    body = answer.strip()
    return bool(body) and body[-1] in ".!?" and any(c.isalpha() for c in body)
