//! Strings: standard functions of CEL, ext.Strings (version 2) of cel-go, and `find` and `findAll`
//! of Kubernetes. Positions count characters.

use regex::{Regex, RegexBuilder};

use super::declaration::{Declaration, Outcome, declare};
use crate::selector::code::Code;
use crate::selector::cost::Cost;
use crate::selector::value::Value;

pub(super) const FUNCTIONS: &[Declaration] = &[
    declare("contains", &["string.(string) bool"], Cost::Substring, |a| {
        of_two(a, |a, b| a.contains(b))
    }),
    declare("startsWith", &["string.(string) bool"], Cost::Characters(1, 1), |a| {
        of_two(a, |a, b| a.starts_with(b))
    }),
    declare("endsWith", &["string.(string) bool"], Cost::Characters(1, 1), |a| {
        of_two(a, |a, b| a.ends_with(b))
    }),
    declare("matches", &["string.(string) bool", "(string, string) bool"], Cost::Regex, |a| {
        with_regex(a, |regex, text, _| Value::Bool(regex.is_match(text)))
    }),
    declare("find", &["string.(string) string"], Cost::Regex, |a| {
        with_regex(a, |regex, text, _| Value::string(regex.find(text).map_or("", |m| m.as_str())))
    }),
    declare(
        "findAll",
        &["string.(string) list(string)", "string.(string, int) list(string)"],
        Cost::Regex,
        |a| {
            with_regex(a, |regex, text, limit| {
                let found = regex.find_iter(text).map(|m| Value::string(m.as_str()));
                Value::list(found.take(limit).collect())
            })
        },
    ),
    declare("charAt", &["string.(int) string"], Cost::One, char_at),
    declare(
        "indexOf",
        &["string.(string) int", "string.(string, int) int"],
        Cost::Elements(0),
        index_of,
    ),
    declare(
        "lastIndexOf",
        &["string.(string) int", "string.(string, int) int"],
        Cost::Elements(0),
        last_index_of,
    ),
    declare("lowerAscii", &["string.() string"], Cost::Characters(0, 1), |a| {
        of_one(a, |s| s.to_ascii_lowercase())
    }),
    declare("upperAscii", &["string.() string"], Cost::Characters(0, 1), |a| {
        of_one(a, |s| s.to_ascii_uppercase())
    }),
    declare("trim", &["string.() string"], Cost::Characters(0, 1), |a| {
        of_one(a, |s| s.trim().to_owned())
    }),
    declare("strings.quote", &["(string) string"], Cost::Characters(0, 1), |a| of_one(a, quote)),
    declare(
        "replace",
        &["string.(string, string) string", "string.(string, string, int) string"],
        Cost::Characters(0, 2),
        replace,
    ),
    declare(
        "split",
        &["string.(string) list(string)", "string.(string, int) list(string)"],
        Cost::Characters(0, 2),
        split,
    ),
    declare(
        "substring",
        &["string.(int) string", "string.(int, int) string"],
        Cost::Characters(0, 1),
        substring,
    ),
    declare(
        "join",
        &["list(string).() string", "list(string).(string) string"],
        Cost::Result,
        join,
    ),
    declare("format", &["string.(list(dyn)) string"], Cost::Characters(0, 1), format),
];

/// Maximum precision of a format clause; the formatter of Rust panics beyond 65,535.
const MAX_PRECISION: usize = 1000;

/// Maximum size of a compiled regular expression, in bytes. A few repeated Unicode classes would
/// take seconds and many megabytes.
const MAX_REGEX_BYTES: usize = 1 << 20;

/// Compiles a regular expression. `regex` supports the syntax of RE2.
///
/// # Errors
/// Returns an error if the pattern is invalid.
pub(super) fn regex(pattern: &str) -> Result<Regex, String> {
    RegexBuilder::new(pattern)
        .size_limit(MAX_REGEX_BYTES)
        .build()
        .map_err(|_| format!("invalid matches argument: `{pattern}` is not a regular expression"))
}

fn with_regex(a: &[Value], f: fn(&Regex, &str, usize) -> Value) -> Outcome {
    let (text, pattern, limit) = match a {
        [Value::String(text), Value::String(pattern)] => (text, pattern, usize::MAX),
        [Value::String(text), Value::String(pattern), Value::Int(limit)] => {
            // A negative limit means no limit.
            (text, pattern, usize::try_from(*limit).unwrap_or(usize::MAX))
        }
        _ => return None,
    };
    Some(regex(pattern).map(|regex| f(&regex, text, limit)))
}

fn of_one(a: &[Value], f: fn(&str) -> String) -> Outcome {
    match a {
        [Value::String(s)] => Some(Ok(Value::string(f(s)))),
        _ => None,
    }
}

fn of_two(a: &[Value], f: fn(&str, &str) -> bool) -> Outcome {
    match a {
        [Value::String(a), Value::String(b)] => Some(Ok(Value::Bool(f(a, b)))),
        _ => None,
    }
}

fn char_at(a: &[Value]) -> Outcome {
    let [Value::String(s), Value::Int(i)] = a else { return None };
    let characters: Vec<char> = s.chars().collect();
    let Some(i) = usize::try_from(*i).ok().filter(|i| *i <= characters.len()) else {
        return Some(Err(format!("index out of range: {i}")));
    };
    Some(Ok(Value::string(characters.get(i).map(char::to_string).unwrap_or_default())))
}

fn index_of(a: &[Value]) -> Outcome {
    let (s, part, from) = match a {
        [Value::String(s), Value::String(part)] => (s, part, 0),
        [Value::String(s), Value::String(part), Value::Int(from)] => (s, part, *from),
        _ => return None,
    };
    Some(search(s, part, from, |s, part, from| (from..s.len()).find(|i| s[*i..].starts_with(part))))
}

fn last_index_of(a: &[Value]) -> Outcome {
    let (s, part, until) = match a {
        [Value::String(s), Value::String(part)] if part.is_empty() => (s, part, i64::MAX),
        [Value::String(s), Value::String(part)] => {
            (s, part, i64::try_from(s.chars().count()).unwrap_or(1) - 1)
        }
        [Value::String(s), Value::String(part), Value::Int(until)] => (s, part, *until),
        _ => return None,
    };
    if until < 0 && a.len() == 2 {
        return Some(Ok(position(None)));
    }
    Some(search(s, part, until, |s, part, until| {
        (0..=until).rev().find(|i| s[*i..].starts_with(part))
    }))
}

/// Searches for `part` from or up to a position. The empty string is found at the position itself,
/// within the text.
fn search(
    s: &str,
    part: &str,
    at: i64,
    find: fn(&[char], &[char], usize) -> Option<usize>,
) -> Result<Value, String> {
    let (s, part): (Vec<char>, Vec<char>) = (s.chars().collect(), part.chars().collect());
    let at = usize::try_from(at).map_err(|_| format!("index out of range: {at}"))?;
    Ok(position(match part.is_empty() {
        true => Some(at.min(s.len())),
        false if at >= s.len() => None,
        false => find(&s, &part, at),
    }))
}

fn position(found: Option<usize>) -> Value {
    Value::Int(found.and_then(|i| i64::try_from(i).ok()).unwrap_or(-1))
}

fn replace(a: &[Value]) -> Outcome {
    let replaced = match a {
        [Value::String(s), Value::String(old), Value::String(new)] => s.replace(&**old, new),
        // A negative number means all.
        [Value::String(s), Value::String(old), Value::String(new), Value::Int(n)] => {
            s.replacen(&**old, new, usize::try_from(*n).unwrap_or(usize::MAX))
        }
        _ => return None,
    };
    Some(Ok(Value::string(replaced)))
}

fn split(a: &[Value]) -> Outcome {
    let (s, separator, limit) = match a {
        [Value::String(s), Value::String(separator)] => (s, separator, -1),
        [Value::String(s), Value::String(separator), Value::Int(limit)] => (s, separator, *limit),
        _ => return None,
    };
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let parts: Vec<Value> = match (limit, separator.is_empty()) {
        (0, _) => Vec::new(),
        (limit, false) => s.splitn(limit, &**separator).map(Value::string).collect(),
        (limit, true) => characters(s, limit),
    };
    Some(Ok(Value::list(parts)))
}

/// Splits into single characters; the last of `limit` parts contains the rest.
fn characters(s: &str, limit: usize) -> Vec<Value> {
    let mut rest = s;
    let mut parts = Vec::new();
    while let Some(first) = rest.chars().next() {
        let end = if parts.len() + 1 == limit { rest.len() } else { first.len_utf8() };
        let (part, after) = rest.split_at(end);
        parts.push(Value::string(part));
        rest = after;
    }
    parts
}

fn substring(a: &[Value]) -> Outcome {
    let (s, start, end) = match a {
        [Value::String(s), Value::Int(start)] => (s, *start, None),
        [Value::String(s), Value::Int(start), Value::Int(end)] => (s, *start, Some(*end)),
        _ => return None,
    };
    let characters: Vec<char> = s.chars().collect();
    let end = end.map_or(Some(characters.len()), |end| usize::try_from(end).ok());
    let part =
        usize::try_from(start).ok().zip(end).and_then(|(start, end)| characters.get(start..end));
    Some(
        part.map(|part| Value::string(part.iter().collect::<String>()))
            .ok_or_else(|| "index out of range".to_owned()),
    )
}

fn join(a: &[Value]) -> Outcome {
    let (list, separator) = match a {
        [Value::List(list)] => (list, ""),
        [Value::List(list), Value::String(separator)] => (list, &**separator),
        _ => return None,
    };
    let parts: Option<Vec<&str>> =
        list.iter().map(|v| if let Value::String(s) = v { Some(&**s) } else { None }).collect();
    Some(
        parts
            .map(|parts| Value::string(parts.join(separator)))
            .ok_or_else(|| "join: not all elements are strings".to_owned()),
    )
}

fn quote(s: &str) -> String {
    let mut quoted = String::from("\"");
    for c in s.chars() {
        match c {
            '\u{7}' => quoted.push_str("\\a"),
            '\u{8}' => quoted.push_str("\\b"),
            '\u{c}' => quoted.push_str("\\f"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            '\u{b}' => quoted.push_str("\\v"),
            '\\' => quoted.push_str("\\\\"),
            '"' => quoted.push_str("\\\""),
            other => quoted.push(other),
        }
    }
    quoted.push('"');
    quoted
}

/// Implements `"%s of %d".format([a, b])` with the clauses %s, %d, %f, %x, %X, %o and %b.
fn format(a: &[Value]) -> Outcome {
    let [Value::String(pattern), Value::List(values)] = a else { return None };
    Some(formatted(pattern, values).map(Value::string))
}

/// Checks a pattern against its literal values.
///
/// # Errors
/// Returns an error if a value does not match its clause, or a clause does not exist.
pub(super) fn check_format(pattern: &str, values: &[(Code, bool)]) -> Result<(), String> {
    let mut given = values.iter();
    for part in parts(pattern)? {
        let Part::Clause { verb, precision } = part else { continue };
        let (value, _) = given.next().ok_or("format: too few values")?;
        if let Code::Constant(value) = value {
            clause(verb, precision, value)?;
        }
    }
    if given.next().is_some() { Err("format: too many values".to_owned()) } else { Ok(()) }
}

fn formatted(pattern: &str, values: &[Value]) -> Result<String, String> {
    let (mut text, mut values) = (String::new(), values.iter());
    for part in parts(pattern)? {
        match part {
            Part::Text(c) => text.push(c),
            Part::Clause { verb, precision } => {
                let value = values.next().ok_or("format: too few values")?;
                text.push_str(&clause(verb, precision, value)?);
            }
        }
    }
    Ok(text)
}

/// A part of a format string.
enum Part {
    Text(char),
    /// `%d`, `%.2f`
    Clause {
        verb: char,
        precision: usize,
    },
}

fn parts(pattern: &str) -> Result<Vec<Part>, String> {
    let (mut parts, mut rest) = (Vec::new(), pattern.chars().peekable());
    while let Some(c) = rest.next() {
        if c != '%' {
            parts.push(Part::Text(c));
            continue;
        }
        if rest.next_if_eq(&'%').is_some() {
            parts.push(Part::Text('%'));
            continue;
        }
        let mut precision = None;
        if rest.next_if_eq(&'.').is_some() {
            let mut digits = String::new();
            while let Some(digit) = rest.next_if(char::is_ascii_digit) {
                digits.push(digit);
            }
            let digits: usize =
                digits.parse().map_err(|_| "format: precision must be a number".to_owned())?;
            if digits > MAX_PRECISION {
                return Err(format!("format: precision exceeds {MAX_PRECISION}"));
            }
            precision = Some(digits);
        }
        let verb = rest.next().ok_or("format: unexpected end of the format")?;
        parts.push(Part::Clause { verb, precision: precision.unwrap_or(6) });
    }
    Ok(parts)
}

fn clause(verb: char, precision: usize, value: &Value) -> Result<String, String> {
    match (verb, value) {
        ('s', value) => shown(value),
        ('d', Value::Int(i)) => Ok(i.to_string()),
        ('d', Value::Uint(u)) => Ok(u.to_string()),
        ('f', Value::Double(d)) => Ok(format!("{d:.precision$}")),
        ('x', Value::Int(i)) => Ok(format!("{i:x}")),
        ('x', Value::Uint(u)) => Ok(format!("{u:x}")),
        ('X', Value::Int(i)) => Ok(format!("{i:X}")),
        ('X', Value::Uint(u)) => Ok(format!("{u:X}")),
        ('o', Value::Int(i)) => Ok(format!("{i:o}")),
        ('b', Value::Int(i)) => Ok(format!("{i:b}")),
        ('b', Value::Bool(b)) => Ok(u8::from(*b).to_string()),
        (verb, value) => {
            Err(format!("format: %{verb} of a {} is not supported", value.type_name()))
        }
    }
}

fn shown(value: &Value) -> Result<String, String> {
    match value {
        Value::Null => Ok("null".to_owned()),
        Value::Bool(b) => Ok(b.to_string()),
        Value::Int(i) => Ok(i.to_string()),
        Value::Uint(u) => Ok(u.to_string()),
        Value::Double(d) => Ok(d.to_string()),
        Value::String(s) => Ok(s.to_string()),
        Value::List(list) => {
            let parts: Result<Vec<String>, String> = list.iter().map(shown).collect();
            Ok(format!("[{}]", parts?.join(", ")))
        }
        other => Err(format!("format: %s of a {} is not supported", other.type_name())),
    }
}
