//! Words that the field does not use.

use super::{Finding, Rule};

/// Banned words and phrases, lower case, and the words to use instead.
const BANNED: &[(&str, &str)] = &[
    ("whoever", "name the program or person"),
    ("somebody", "name the program or person"),
    ("someone", "name the program or person"),
    ("anybody", "name the program or person"),
    ("nobody", "no process, no claim, no tenant"),
    ("none of ours", "not created by Tessera"),
    ("makes no sense", "is corrupt, is invalid"),
    ("in vain", "without effect, failed"),
    ("two masters", "allocated twice"),
    ("put right", "repair"),
    ("puts right", "repairs"),
    ("make whole", "restore"),
    ("given out", "allocated"),
    ("gives out", "allocates"),
    ("taken back", "deallocated, released"),
    ("takes back", "deallocates, releases"),
    ("stands in the way", "blocks"),
    ("last word", "last message"),
    ("what is known of", "the state of"),
    ("something is known against", "is tainted as unhealthy"),
    ("has to wait", "is pending"),
    ("have to wait", "are pending"),
    ("room that was made", "capacity that was freed"),
    ("looks after", "supervises, maintains"),
    ("looked after", "supervised, maintained"),
    ("keeper", "supervisor"),
    ("crowd", "contention"),
    ("stranger", "unmeasured kernel"),
    ("strangers", "unmeasured kernels"),
    ("burial", "reclaim"),
    ("buried", "reclaimed"),
    ("takings", "drained budget"),
    ("hindrance", "blocker"),
    ("remedy", "repair action"),
    ("allotment", "allocation"),
    ("wish", "request, desired state"),
    ("wishes", "preferences"),
    ("desk", "registry, harness"),
    ("rig", "harness"),
    ("stand-in", "fake"),
    ("stand-ins", "fakes"),
    ("bookkeeping", "accounting"),
    ("ruined", "corrupted"),
];

/// Reports banned words anywhere in a file: comments, texts and names, whose parts count as words.
pub(super) fn check(path: &str, text: &str, findings: &mut Vec<Finding>) {
    for (number, line) in (1..).zip(text.lines()) {
        let words = words_of(line);
        for (banned, better) in BANNED {
            if words.contains(&format!(" {} ", banned.replace('-', " "))) {
                findings.push(Finding {
                    rule: Rule::BannedWord,
                    path: path.to_owned(),
                    line: number,
                    message: format!("`{banned}`: {better}"),
                });
            }
        }
    }
}

/// Returns the words of a line in lower case with one space before and after each: `FooBar_baz-qux`
/// is ` foo bar baz qux `.
fn words_of(line: &str) -> String {
    let mut words = String::from(" ");
    let mut previous = ' ';
    for character in line.chars() {
        if !character.is_alphanumeric() {
            if !words.ends_with(' ') {
                words.push(' ');
            }
        } else {
            if character.is_uppercase() && previous.is_lowercase() {
                words.push(' ');
            }
            words.extend(character.to_lowercase());
        }
        previous = character;
    }
    if !words.ends_with(' ') {
        words.push(' ');
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages_of(line: &str) -> Vec<String> {
        let mut findings = Vec::new();
        check("a.rs", line, &mut findings);
        findings.into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn banned_words_are_found_in_prose_and_in_names() {
        for line in [
            "// Whoever reads this.",
            "let keeper_thread = 1;",
            "struct MpsKeeper;",
            "the stand-in answers",
            "mod stand_in;",
            "it is none of ours, so",
        ] {
            assert_eq!(messages_of(line).len(), 1, "{line}");
        }
    }

    #[test]
    fn words_that_contain_a_banned_word_are_not_reported() {
        for line in ["crowded", "bookkeepers", "trigger", "origin", "desktop"] {
            assert_eq!(messages_of(line), Vec::<String>::new(), "{line}");
        }
    }
}
