use std::fmt::Display;

/// Reports on standard error that the test `name` cannot run on this machine, as `SKIPPED: NAME:
/// REASON`.
///
/// `.ci/run` searches such lines in the output of `make test SHOW_SKIPPED=1` and fails unless
/// `.ci/allowed-skips` has the name.
///
/// # Panics
/// Panics if the name is empty or has a colon, or the reason is empty: `.ci/run` would not find the
/// line.
pub fn report_skip(name: &str, reason: impl Display) {
    eprintln!("{}", skip_line(name, reason));
}

/// Returns the line of [`report_skip`]. A reason of several lines becomes one.
///
/// # Panics
/// Panics like [`report_skip`].
pub fn skip_line(name: &str, reason: impl Display) -> String {
    let reason = reason.to_string();
    let reason: Vec<&str> = reason.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    assert!(!name.is_empty() && !name.contains([':', '\n']), "invalid test name: {name:?}");
    assert!(!reason.is_empty(), "no reason for skipping {name}");
    format!("SKIPPED: {name}: {}", reason.join("; "))
}

/// Returns the name of the enclosing function without its modules, for [`report_skip`].
#[macro_export]
macro_rules! test_name {
    () => {{
        fn here() {}
        $crate::enclosing_function(std::any::type_name_of_val(&here))
    }};
}

/// Returns the name of the function around an item, from the item's path.
#[doc(hidden)]
pub fn enclosing_function(item: &'static str) -> &'static str {
    let (function, _item) = item.rsplit_once("::").expect("the path of an item in a function");
    let function = function.trim_end_matches("::{{closure}}");
    function.rsplit("::").next().unwrap_or(function)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returns_name_of_enclosing_function() {
        assert_eq!(test_name!(), "returns_name_of_enclosing_function");
        let in_a_closure = || test_name!();
        assert_eq!(in_a_closure(), "returns_name_of_enclosing_function");
    }

    #[test]
    fn skip_line_has_name_and_reason() {
        let line = skip_line("a_test", "unshare failed:\n  Operation not permitted\n");
        assert_eq!(line, "SKIPPED: a_test: unshare failed:; Operation not permitted");
    }

    #[test]
    #[should_panic(expected = "no reason for skipping a_test")]
    fn panics_without_reason() {
        skip_line("a_test", " \n");
    }

    #[test]
    #[should_panic(expected = "invalid test name")]
    fn panics_on_name_with_colon() {
        skip_line("module::a_test", "no namespaces");
    }
}
