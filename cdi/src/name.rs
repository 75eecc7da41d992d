//! Names of CDI: kinds, devices, and the two together.
//!
//! Rules: "CDI specification, Format" at github.com/cncf-tags/container-device-interface.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// Why a CDI name was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// A kind is `<vendor>/<class>`.
    #[error("`{0}` is not a CDI kind: write <vendor>/<class>")]
    NotAKind(String),
    /// A qualified name is `<vendor>/<class>=<device>`.
    #[error("`{0}` is not a qualified CDI device name: write <vendor>/<class>=<device>")]
    NotQualified(String),
    /// Vendors and classes begin with a letter, end with a letter or digit, and hold letters,
    /// digits, `-`, `_`, `.`.
    #[error(
        "`{0}` is not a CDI vendor or class: letters, digits, `-`, `_` and `.`, starting with a letter"
    )]
    VendorOrClass(String),
    /// Devices begin and end with a letter or digit, and hold letters, digits, `-`, `_`, `.`, `:`.
    #[error(
        "`{0}` is not a CDI device name: letters, digits, `-`, `_`, `.` and `:`, alphanumeric at both ends"
    )]
    Device(String),
}

/// `<vendor>/<class>`: what a spec describes devices of.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Kind {
    vendor: String,
    class: String,
}

impl Kind {
    /// The kind of this vendor and class.
    ///
    /// # Errors
    /// [`NameError::VendorOrClass`] with the part that is wrong.
    pub fn new(vendor: &str, class: &str) -> Result<Self, NameError> {
        for part in [vendor, class] {
            if !is_vendor_or_class(part) {
                return Err(NameError::VendorOrClass(part.to_owned()));
            }
        }
        Ok(Self { vendor: vendor.to_owned(), class: class.to_owned() })
    }

    /// The vendor, which is a domain name by custom.
    #[must_use]
    pub fn vendor(&self) -> &str {
        &self.vendor
    }

    /// The class.
    #[must_use]
    pub fn class(&self) -> &str {
        &self.class
    }

    /// The full name of a device of this kind.
    #[must_use]
    pub fn device(&self, name: DeviceName) -> QualifiedName {
        QualifiedName { kind: self.clone(), name }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.vendor, self.class)
    }
}

impl FromStr for Kind {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let (vendor, class) =
            text.split_once('/').ok_or_else(|| NameError::NotAKind(text.to_owned()))?;
        Self::new(vendor, class)
    }
}

impl TryFrom<String> for Kind {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        text.parse()
    }
}

impl From<Kind> for String {
    fn from(kind: Kind) -> Self {
        kind.to_string()
    }
}

/// A device's name within its kind.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DeviceName(String);

impl DeviceName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for DeviceName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        if !is_device_name(text) {
            return Err(NameError::Device(text.to_owned()));
        }
        Ok(Self(text.to_owned()))
    }
}

impl TryFrom<String> for DeviceName {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        text.parse()
    }
}

impl From<DeviceName> for String {
    fn from(name: DeviceName) -> Self {
        name.0
    }
}

/// `<vendor>/<class>=<device>`: what the kubelet hands to the container runtime.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct QualifiedName {
    kind: Kind,
    name: DeviceName,
}

impl QualifiedName {
    /// The device's kind.
    #[must_use]
    pub fn kind(&self) -> &Kind {
        &self.kind
    }

    /// The device's name within its kind.
    #[must_use]
    pub fn name(&self) -> &DeviceName {
        &self.name
    }
}

impl fmt::Display for QualifiedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.kind, self.name)
    }
}

impl FromStr for QualifiedName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let (kind, name) =
            text.split_once('=').ok_or_else(|| NameError::NotQualified(text.to_owned()))?;
        Ok(Self { kind: kind.parse()?, name: name.parse()? })
    }
}

impl TryFrom<String> for QualifiedName {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        text.parse()
    }
}

impl From<QualifiedName> for String {
    fn from(name: QualifiedName) -> Self {
        name.to_string()
    }
}

fn is_vendor_or_class(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphabetic())
        && text.ends_with(|last: char| last.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}

fn is_device_name(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphanumeric())
        && text.ends_with(|last: char| last.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_qualified_name_reads_back_as_it_was_written() {
        let text = "k8s.gpu.tessera.dev/claim=0a1b-2c3d";
        let name: QualifiedName = text.parse().expect("a qualified name");
        assert_eq!((name.kind().vendor(), name.kind().class()), ("k8s.gpu.tessera.dev", "claim"));
        assert_eq!(name.to_string(), text);
    }

    #[test]
    fn names_that_a_runtime_would_refuse_are_refused() {
        for kind in [
            "",
            "vendor",
            "vendor/",
            "/class",
            "1vendor/class",
            "vendor./class",
            "vendor/cl*ss",
            "a/b/c",
        ] {
            assert!(kind.parse::<Kind>().is_err(), "{kind:?}");
        }
        for device in ["", "-a", "a-", "a b", "_a", "a/b", "ä", "../x"] {
            assert!(device.parse::<DeviceName>().is_err(), "{device:?}");
        }
        for name in ["vendor/class", "vendor/class=", "=x", "vendor/class=a=b"] {
            assert!(name.parse::<QualifiedName>().is_err(), "{name:?}");
        }
    }
}
