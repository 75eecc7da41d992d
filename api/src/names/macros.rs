//! `name_type!`: newtypes of validated strings.

/// Defines a name: a reference-counted string with validated syntax.
///
/// `$canonical` turns text into the stored form, or `None` where the text breaks the rule.
macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident, $kind:literal, at most $limit:literal, $rule:literal, $canonical:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(std::sync::Arc<str>);

        impl $name {
            /// Valid syntax, for error messages.
            pub const RULE: &'static str = $rule;

            /// Parses the text.
            ///
            /// # Errors
            /// The text is empty, too long or breaks the rule of this type.
            pub fn new(text: impl AsRef<str>) -> Result<Self, $crate::names::NameError> {
                let text = text.as_ref();
                if text.is_empty() {
                    return Err($crate::names::NameError::Empty { kind: $kind, rule: Self::RULE });
                }
                if text.len() > $limit {
                    return Err($crate::names::NameError::TooLong {
                        kind: $kind,
                        value: text.to_owned(),
                        length: text.len(),
                        limit: $limit,
                    });
                }
                let canonical: fn(&str) -> Option<std::sync::Arc<str>> = $canonical;
                canonical(text).map(Self).ok_or_else(|| $crate::names::NameError::Malformed {
                    kind: $kind,
                    value: text.to_owned(),
                    rule: Self::RULE,
                })
            }

            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::names::NameError;
            fn from_str(text: &str) -> Result<Self, Self::Err> {
                Self::new(text)
            }
        }

        impl TryFrom<&str> for $name {
            type Error = $crate::names::NameError;
            fn try_from(text: &str) -> Result<Self, Self::Error> {
                Self::new(text)
            }
        }

        impl TryFrom<String> for $name {
            type Error = $crate::names::NameError;
            fn try_from(text: String) -> Result<Self, Self::Error> {
                Self::new(text)
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0.as_ref().to_owned()
            }
        }

        impl From<&$name> for String {
            fn from(name: &$name) -> Self {
                name.0.as_ref().to_owned()
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl PartialEq<str> for $name {
            fn eq(&self, other: &str) -> bool {
                self.as_str() == other
            }
        }

        impl PartialEq<&str> for $name {
            fn eq(&self, other: &&str) -> bool {
                self.as_str() == *other
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(&self.0)
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "{}({:?})", stringify!($name), &*self.0)
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.0)
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = <std::borrow::Cow<'de, str> as serde::Deserialize<'de>>::deserialize(deserializer)?;
                Self::new(text).map_err(serde::de::Error::custom)
            }
        }
    };
}

/// Turns a predicate into the `canonical` argument of [`name_type`]: the text is kept as it is.
macro_rules! kept_if {
    ($predicate:path) => {
        |text| $predicate(text).then(|| std::sync::Arc::from(text))
    };
}

pub(super) use {kept_if, name_type};
