"""Prompts that the target writes its own training text from: topics x forms, made here, nothing fetched.

Half go through the checkpoint's chat template, half are plain text that wants to be continued. A topic belongs either to
training or to the held-out prompts, never to both, so that acceptance on held-out prompts says something. Most training prompts
are about words out of the vocabulary instead: a hundred times as many as there are topics.
"""

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

TOPICS = tuple(
    """
bees|the history of paper|sleep|volcanoes|chess|the Roman Empire|compost|electric motors|tea|whales|gravity|learning the guitar|
public libraries|the moon|cheese|earthquakes|saving money|mountain climbing|vaccines|bridges|the Silk Road|cats|solar panels|honesty|
swimming|the printing press|penguins|rain|job interviews|glass|the human heart|street markets|friendship|robots|gardening in spring|
ancient Egypt|bicycles for children|running a small shop|dolphins|thunderstorms|the invention of the telephone|vegetable soup|
remote work|black holes|recycling|the Vikings|public speaking|coral reefs|coffee|time zones|dinosaurs|knitting|stress|steam engines|
fair trade|owls|the immune system|wood|photography|deserts|trains at night|a good breakfast|encryption|the Renaissance|wolves|yoga|
the water cycle|artificial intelligence|school uniforms|wind turbines|pasta|the stock market|butterflies|the Second World War|
moving to a new city|magnets|museums|camping with a family|DNA|the Great Wall of China|basketball|lost luggage|the sea floor|
climate change|learning to drive|candles|genetics|a broken window|the violin|democracy|salt|old maps|the nervous system|
rice farming|hospitals|a birthday party|satellites|the speed of light|rivers in winter|neighbours who make noise|horses|inflation|
poetry|first aid|the Arctic|apples|a new puppy|data privacy|the theatre|mathematics in daily life|clouds|nutrition|trade unions|
the ozone layer|fishing villages|cooking for one person|jazz|meditation|traffic jams|insects|the French language|old radios|
healthy teeth|wedding speeches|Mars|plastic|a lost key|the discovery of penicillin|sailing|working in a team|spiders|elections|
the telescope|ceramics|weather forecasts|rust|the brain and memory|holidays by train|bread without yeast|computer viruses|elephants|
the industrial revolution|a long queue|sunflowers|football|mobile phones and children|the Mediterranean|lemons|a haunted house|
batteries|marathon training|the alphabet|ghost stories|budgeting for students|frogs|the periodic table|a rainy Sunday|hotels|
the Amazon river|space stations|homework|tigers|water shortage|making friends as an adult|mushrooms|clocks|the Olympic Games|
urban planning|cold winters|oil paintings|a stolen painting|carpets|the digestive system|pirates|probability|ice cream|forest fires|
leadership|snakes|the price of houses|a lonely robot|geometry|night buses|the Cold War|pumpkins|asthma|customer service|
the northern lights|a talking tree|crossword puzzles|lightning|the Aztecs|tomatoes|tourism|a secret garden|algebra|flu|
""".replace("\n", "")
    .strip("|")
    .split("|")
)

_QUESTIONS = (
    "Explain {t} to a beginner.",
    "What is the most important thing to know about {t}?",
    "Give me five facts about {t}.",
    "Write a short story about {t}.",
    "Write a poem about {t}.",
    "What are the advantages and disadvantages of {t}?",
    "How would you explain {t} to a ten year old child?",
    "Write a letter to a friend about {t}.",
    "Summarise what is known about {t} in three sentences.",
    "Give step by step advice to someone who is interested in {t}.",
    "Write a dialogue between a teacher and a student about {t}.",
    "List ten words that have to do with {t} and explain each of them.",
    "What are common mistakes people make when they talk about {t}?",
    "Write an introduction to an essay about {t}.",
    "Compare {t} with {u}.",
    "Why do people care about {t}?",
    "Write an email to a colleague in which you suggest a talk about {t}.",
    "Tell me a joke about {t} and then explain why it is funny.",
    "Write a quiz with three questions and answers about {t}.",
    "What will {t} look like in fifty years?",
    "Describe {t} using all five senses.",
    "Write a news report about {t}.",
    "Who are three people that matter in the history of {t}, and why?",
    "I know nothing about {t}. Where should I begin?",
    "Write a product description that has to do with {t}.",
    "Make a table of contents for a book about {t}.",
    "Write the first paragraph of a novel about {t} and {u}.",
    "What is the connection between {t} and {u}?",
    "Give me three arguments for and three arguments against {t}.",
    "Plan a lesson of one hour about {t}.",
    "Translate the following sentence into French: I have read a book about {t}.",
    "Write a diary entry of someone who has thought about {t} all day.",
)
_CODE_QUESTIONS = (
    "Write a Python function that {c}.",
    "Write a Python function that {c}, with a docstring and an example.",
    "How do I write a program that {c}?",
    "Explain how an algorithm works that {c}.",
    "Write a JavaScript function that {c}.",
    "What is the time complexity of code that {c}?",
)
_CODE_TASKS = [
    "reverses a string",
    "sorts a list of numbers",
    "counts the words in a text",
    "finds the largest item of a list",
    "checks whether a word is a palindrome",
    "computes the factorial of a number",
    "merges two dictionaries",
    "removes duplicates from a list",
    "reads a CSV file",
    "finds the greatest common divisor",
    "converts Celsius to Fahrenheit",
    "computes the average of a list",
    "prints a multiplication table",
    "searches a sorted list",
    "flattens a nested list",
    "counts vowels in a string",
    "generates a random password",
    "validates an email address",
    "computes the sum of squares",
    "groups names by their first letter",
    "rotates a matrix",
    "transposes a matrix",
    "finds prime numbers up to a limit",
    "parses a date",
    "simulates a dice game",
    "keeps a shopping list",
    "computes compound interest",
    "finds the shortest word",
    "implements a stack",
    "implements a queue",
    "draws a triangle of stars",
    "converts a number to binary",
]
_SUMS = (
    "{n} has {a} apples and buys {b} more. How many apples does {n} have now? Explain each step.",
    "A shop sells pens at {a} cents each. How much do {b} pens cost? Show the calculation.",
    "What is {a} plus {b}? What is {a} times {b}?",
    "{n} walks {a} kilometres on Monday and {b} kilometres on Tuesday. How far does {n} walk in both days?",
    "A box holds {a} eggs. How many boxes are needed for {b} eggs? Think step by step.",
)
_NAMES = [
    "Anna",
    "Tom",
    "Mrs Green",
    "Peter",
    "Fatima",
    "Mr Okafor",
    "Lucy",
    "Old Joseph",
    "Mei",
    "the captain",
    "Clara",
    "Samuel",
    "Ivan",
    "Rosa",
    "Doctor Hill",
    "Amir",
    "Ella",
    "Jack",
]
_PLACES = [
    "a small town",
    "the harbour",
    "a village in the mountains",
    "the old station",
    "a big city",
    "the edge of the forest",
    "an island",
    "the market",
    "a farm",
    "the school",
]

_BEGINNINGS = (
    "{T} is",
    "The history of {t} begins",
    "When people think of {t}, they often",
    "Once upon a time in {p}, {n} dreamed of {t}. One day",
    "{N} had never cared much for {t}, but that morning in {p}",
    "There are three reasons why {t} matters. First,",
    "Question: What is interesting about {t}?\nAnswer:",
    "Chapter One\n\nThe first thing {n} noticed in {p} was {t}.",
    "Here is a list of facts about {t}.\n\n1.",
    "Dear {n},\n\nThank you for your letter about {t}. I",
    "The following is a conversation between {n} and a friend about {t}.\n\n{N}:",
    "# {T}\n\nThis guide explains {t} in plain words.\n\n## Introduction\n\n",
    "Scientists who study {t} have found that",
    "In {p} there lived a woman who knew everything about {t}. She",
    "Most books about {t} say that",
    "A good way to learn about {t} is to",
    "The relation between {t} and {u} is",
    "It was late when {n} came back to {p}. On the table lay a book about {t}, and",
    "Teacher: Today we talk about {t}. Who can tell me something about it?\nStudent:",
    "{T}: an overview\n\nAbstract. In this paper we",
    "My grandfather used to say that {t} and {u} have one thing in common:",
    "News from {p}: {t}",
    "Q: How does one begin with {t}?\nA:",
    "Title: {T}\nAuthor: {N}\n\n",
    "People in {p} have known about {t} for hundreds of years. They",
    "The best thing about {t} is",
    "Step 1: Find out what you need for {t}.\nStep 2:",
    "Write a paragraph about {t}.\n\n",
    "Explain in simple terms why {t} is important.",
    "Give three tips for someone who wants to know more about {t}. For each tip, say why it works.",
    "Tell a story about {n}, who lives in {p} and loves {t}.",
    "Summarise the main facts about {t} in five sentences.",
    "Subject: A question about {t}\n\nHello {n},\n\n",
    "| Topic | Description |\n| --- | --- |\n| {T} |",
)
_CODE_BEGINNINGS = (
    "# A Python function that {c}\ndef",
    'def main():\n    """A program that {c}."""\n',
    "import sys\nimport random\n\n# This program {c}.\n",
    "// A function that {c}\nfunction",
    "The following code {c}:\n\n```python\n",
    "class Solver:\n    def __init__(self, items):\n        self.items = items\n\n    # {c}\n    def",
    "SELECT name, price FROM products WHERE",
    "public class Main {\n    // {c}\n    public static",
)
_HELD_OUT_EVERY = 10  # one topic or task in so many
_SHARE_OF_WORDS = 0.7  # of the prompts that have a topic, where there are words
_SHARE_OF_CODE = 0.12
_SHARE_OF_SUMS = 0.05


@dataclass(frozen=True)
class Prompt:
    """``text``: a user's message where ``chat``, else the beginning of a text."""

    text: str
    chat: bool


def split(items: tuple[str, ...] | list[str], held_out: bool) -> list[str]:
    """The items that are held out, or those that are not."""
    return [item for i, item in enumerate(items) if (i % _HELD_OUT_EVERY == _HELD_OUT_EVERY // 2) == held_out]


def words_of(vocabulary: Iterable[str]) -> list[str]:
    """Of a byte-level vocabulary's tokens, those that are a word of four letters or more, sorted."""
    return sorted(token[1:] for token in vocabulary if re.fullmatch("\u0120[a-z]{4,}", token))


def prompts(seed: int, held_out: bool = False, words: Sequence[str] = ()) -> Iterator[Prompt]:
    """Prompts without end; the same for the same seed. Chat and plain alternate. ``words``: for topics beside those above."""
    rng = random.Random(f"{seed} {held_out}")
    topics, tasks = split(TOPICS, held_out), split(_CODE_TASKS, held_out)
    for i in count():
        yield _one(rng, topics, tasks, words, chat=i % 2 == 0)


def _one(rng: random.Random, topics: list[str], tasks: list[str], words: Sequence[str], chat: bool) -> Prompt:
    kind = rng.random()
    if kind < _SHARE_OF_CODE:
        form = rng.choice(_CODE_QUESTIONS if chat else _CODE_BEGINNINGS)
        return Prompt(form.replace("{c}", rng.choice(tasks)), chat)
    name = rng.choice(_NAMES)
    if kind < _SHARE_OF_CODE + _SHARE_OF_SUMS:
        text = rng.choice(_SUMS).format(n=name, a=rng.randint(2, 99), b=rng.randint(2, 99))
        return Prompt(text[0].upper() + text[1:], chat)
    if words and rng.random() < _SHARE_OF_WORDS:
        topic, other = " ".join(rng.sample(words, rng.randint(1, 2))), rng.choice(topics)
    else:
        topic, other = rng.sample(topics, 2)
    text = rng.choice(_QUESTIONS if chat else _BEGINNINGS).format(
        t=topic, u=other, T=topic[0].upper() + topic[1:], n=name, N=name[0].upper() + name[1:], p=rng.choice(_PLACES)
    )
    return Prompt(text, chat)
