//! Errors as one line of text, for logs, events and gRPC.

use std::error::Error;

/// Returns the text of an error and its causes, separated by `: `.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt;

    #[derive(Debug)]
    struct ErrorCause(&'static str, Option<Box<ErrorCause>>);

    impl fmt::Display for ErrorCause {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for ErrorCause {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_deref().map(|cause| cause as _)
        }
    }

    #[test]
    fn names_every_cause_in_order() {
        let nail = ErrorCause("no nail", None);
        let shoe = ErrorCause("no shoe", Some(Box::new(nail)));
        assert_eq!(
            chain(&ErrorCause("no horse", Some(Box::new(shoe)))),
            "no horse: no shoe: no nail"
        );
    }
}
