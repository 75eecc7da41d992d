//! Functions of the driver that have a hook, and those that need one and lack it.

mod container;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use container::exported;
use tessera_intercept_symbols::{CLASSES, Class, Symbol, TABLE, class_of, find};

const DOCUMENT: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/intercept-symbols.md");

const HEAD: &str = "# Which functions of the driver the interceptor stands before

Written by the test `coverage` of `intercept/hook` from `intercept/symbols` and from what the built library exports; `UPDATE=1`
writes it anew. A function that has a class and no hook here is a hole: what a program does through it is neither charged
nor limited.
";

/// The forms of the functions of one group of `classes.txt`.
struct Group {
    class: Class,
    why: &'static str,
    hooked: Vec<&'static str>,
    missing: Vec<&'static str>,
}

fn groups() -> Vec<Group> {
    let of_group = |why: &str| {
        let in_group =
            |symbol: &&Symbol| class_of(symbol.base.text).is_some_and(|class| class.why == why);
        TABLE.iter().filter(in_group).map(|symbol| symbol.symbol.text).collect::<Vec<_>>()
    };
    let chunks = CLASSES.chunk_by(|one, other| one.why == other.why);
    let group = |chunk: &[tessera_intercept_symbols::Classified]| {
        let (class, why) = (chunk[0].class, chunk[0].why);
        let (hooked, missing) =
            of_group(why).into_iter().partition(|symbol| exported().contains(*symbol));
        Group { class, why, hooked, missing }
    };
    chunks.map(group).collect()
}

fn document(groups: &[Group]) -> String {
    let mut text = HEAD.to_owned();
    let stood_before = |group: &&Group| group.class.is_hooked();
    let count =
        |forms: fn(&Group) -> usize| groups.iter().filter(stood_before).map(forms).sum::<usize>();
    let hooked = count(|group| group.hooked.len());
    let needed = hooked + count(|group| group.missing.len());
    let mut add = |line: std::fmt::Arguments<'_>| writeln!(text, "{line}").expect("a string");
    add(format_args!(
        "\nOf {} functions in all their forms, {needed} need a hook; {hooked} have one.",
        TABLE.len()
    ));
    for (title, forms) in [
        ("Still to be hooked", (|group| &group.missing) as fn(&Group) -> &Vec<&'static str>),
        ("Hooked", |group| &group.hooked),
    ] {
        add(format_args!("\n## {title}\n\n| class | what it does | forms |\n|---|---|---|"));
        for group in groups.iter().filter(stood_before).filter(|group| !forms(group).is_empty()) {
            let names =
                forms(group).iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(" ");
            add(format_args!("| {} | {} | {names} |", group.class.name(), group.why));
        }
    }
    add(format_args!("\n## Passed through\n\n| forms | why they may pass |\n|---|---|"));
    for group in groups.iter().filter(|group| !group.class.is_hooked()) {
        add(format_args!("| {} | {} |", group.missing.len(), group.why));
    }
    text
}

#[test]
fn list_of_hooked_symbols_is_up_to_date() {
    let text = document(&groups());
    if std::env::var_os("UPDATE").is_some() {
        fs::write(DOCUMENT, &text).expect("written");
    }
    let written = fs::read_to_string(DOCUMENT).unwrap_or_default();
    assert!(
        written == text,
        "{} is out of date; if that is meant: UPDATE=1",
        Path::new(DOCUMENT).display()
    );
}

#[test]
fn functions_that_pass_through_have_no_hook() {
    for group in groups().iter().filter(|group| !group.class.is_hooked()) {
        assert!(
            group.hooked.is_empty(),
            "hooked, and said to pass: {:?}: {}",
            group.hooked,
            group.why
        );
    }
}

#[test]
fn every_hook_is_of_a_known_function() {
    let of_driver = |name: &&String| !matches!(name.as_str(), "dlsym" | "dlvsym");
    let unknown: Vec<_> =
        exported().iter().filter(of_driver).filter(|name| find(name).is_none()).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}

/// A program that uses one version of a function must not bypass the hook of another.
#[test]
fn function_is_hooked_in_all_forms_or_none() {
    let mut bases: BTreeMap<&str, (usize, Vec<&str>)> = BTreeMap::new();
    for symbol in TABLE {
        let (hooked, missing) = bases.entry(symbol.base.text).or_default();
        if exported().contains(symbol.symbol.text) {
            *hooked += 1;
        } else {
            missing.push(symbol.symbol.text);
        }
    }
    let partly: Vec<_> =
        bases.values().filter(|(hooked, _)| *hooked > 0).flat_map(|(_, missing)| missing).collect();
    assert!(partly.is_empty(), "without a hook, while another form of it has one: {partly:?}");
}

/// A function that allocates, launches or reports, and that is reachable without a hook, is a
/// bypass.
#[test]
fn every_function_that_needs_a_hook_has_one() {
    /// Functions without a hook, each with the reason: none.
    const HOLES: &[(&str, &str)] = &[];
    let allowed = |symbol: &&&str| HOLES.iter().any(|(hole, _)| hole == *symbol);
    let groups = groups();
    let holes: Vec<_> = groups
        .iter()
        .filter(|group| group.class.is_hooked())
        .flat_map(|group| &group.missing)
        .filter(|symbol| !allowed(symbol))
        .collect();
    assert!(holes.is_empty(), "no hook stands before {holes:?}");
}
