"""What lines of `.env` mean, for our reader and for Docker Compose alike."""

from __future__ import annotations

ENVIRON = {"HOME": "/h"}
READ = {
    "A=plain": {"A": "plain"},
    "A = spaced  ": {"A": "spaced"},
    "  A=1": {"A": "1"},
    "A: b: c": {"A": "b: c"},
    "A==b=c": {"A": "=b=c"},
    "export A=1": {"A": "1"},
    "export   A = b": {"A": "b"},
    "export=1": {"export": "1"},
    "exportB=1": {"exportB": "1"},
    "A=\nB=''\nC=\"\"": {"A": "", "B": "", "C": ""},
    "# A=1\n\n   # B=2\nC=3": {"C": "3"},
    "A=1\nA=2": {"A": "2"},
    "A=1\r\nB=2\r\n": {"A": "1", "B": "2"},
    "\ufeffA=1": {"A": "1"},
    "A=zwölf²": {"A": "zwölf²"},
    "A.x=1\nB-y=2\n1C=3": {"A.x": "1", "B-y": "2", "1C": "3"},
    # comments
    "A=val # comment": {"A": "val"},
    "A=val#no comment": {"A": "val#no comment"},
    "A=#no comment": {"A": "#no comment"},
    "A=  # no comment either": {"A": "# no comment either"},
    "A=a\t# no blank in front": {"A": "a\t# no blank in front"},
    "A='x' # comment\nB=\"y\"#comment\nC=1": {"A": "x", "B": "y", "C": "1"},
    'A="x # y"': {"A": "x # y"},
    # quotes
    "A='single $HOME ${X} \\n'": {"A": "single $HOME ${X} \\n"},
    "A='it\\'s'": {"A": "it's"},
    "A='a\\\\b'": {"A": "a\\\\b"},
    "A='two\nlines' # comment\nB=1": {"A": "two\nlines", "B": "1"},
    'A="two\n# lines"\nB=1': {"A": "two\n# lines", "B": "1"},
    'A="esc\\n\\t\\"q\\" \\\\ z"': {"A": 'esc\n\t"q" \\ z'},
    'A="a\\z\\u0041\\\'"': {"A": "a\\z\\u0041\\'"},
    "A=a b  c": {"A": "a b  c"},
    "A=it's": {"A": "it's"},
    'A=say "hi"': {"A": 'say "hi"'},
    "A=x'y z'": {"A": "x'y z'"},
    "A=--flag '{\"a\": 1}' --other": {"A": "--flag '{\"a\": 1}' --other"},
    "A=a\\nb\\\\": {"A": "a\\nb\\\\"},
    # expansion
    "A=$HOME/x-${HOME}": {"A": "/h/x-/h"},
    'A="$HOME \\$HOME $$HOME"': {"A": "/h $HOME $HOME"},
    "A=1\nB=${A}-${MISSING:-other}": {"A": "1", "B": "1-other"},
    "A=${HOME:-}${X-}${HOME-x}${X:-a b}": {"A": "/h/ha b"},
    "A=${HOME:+alt}${X+alt}${HOME:?said}": {"A": "alt/h"},
    "HOME=/mine\nA=$HOME": {"HOME": "/mine", "A": "/h"},
    "B='$x'\nA=${B}y": {"B": "$x", "A": "$xy"},
    "A=a$\nB=a$ b\nC=5$%\nD=$(ls)\nE=$$": {"A": "a$", "B": "a$ b", "C": "5$%", "D": "$(ls)", "E": "$"},
}
# Compose refuses these as well.
REFUSED_BY_BOTH = [
    "A='s3cret",
    'A="s3cret\nB=2',
    "A B=s3cret",
    "A=s3cret${X",
    "A=s3cret${X:?is not set}",
    "A=s3cret${}",
]
# Compose takes these, and drops or moves something without a word.
REFUSED = [*REFUSED_BY_BOTH, "A='s3cret' more", 'A="s3cret"more', "=s3cret", "A=s3cret${X:-${HOME}}"]
