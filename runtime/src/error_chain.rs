//! Errors as one line of text: for logs, events and gRPC, which have room for no more.

use std::error::Error;

/// An error and its causes, `: ` between them.
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
    struct Because(&'static str, Option<Box<Because>>);

    impl fmt::Display for Because {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Because {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_deref().map(|cause| cause as _)
        }
    }

    #[test]
    fn every_cause_is_named_in_order() {
        let nail = Because("no nail", None);
        let shoe = Because("no shoe", Some(Box::new(nail)));
        assert_eq!(chain(&Because("no horse", Some(Box::new(shoe)))), "no horse: no shoe: no nail");
    }
}
