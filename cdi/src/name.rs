//! Names of CDI: kinds, devices, and qualified names.
//!
//! Rules: "CDI specification, Format" at github.com/cncf-tags/container-device-interface.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// Error of an invalid CDI name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CdiNameError {
    /// A kind is not `<vendor>/<class>`.
    #[error("invalid CDI kind `{0}`: expected <vendor>/<class>")]
    NotAKind(String),
    /// A qualified name is not `<vendor>/<class>=<device>`.
    #[error("invalid qualified CDI device name `{0}`: expected <vendor>/<class>=<device>")]
    NotQualified(String),
    /// A vendor or class is invalid. Both begin with a letter, end with a letter or digit, and have
    /// letters, digits, `-`, `_` and `.`.
    #[error(
        "invalid CDI vendor or class `{0}`: use letters, digits, `-`, `_` and `.`, starting with a letter"
    )]
    VendorOrClass(String),
    /// A device name is invalid. It begins and ends with a letter or digit, and has letters,
    /// digits, `-`, `_`, `.` and `:`.
    #[error(
        "invalid CDI device name `{0}`: use letters, digits, `-`, `_`, `.` and `:`, alphanumeric at both ends"
    )]
    Device(String),
}

/// Kind of a spec's devices: `<vendor>/<class>`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CdiKind {
    vendor: String,
    class: String,
}

impl CdiKind {
    /// Returns the kind of a vendor and a class.
    ///
    /// # Errors
    /// Returns [`CdiNameError::VendorOrClass`] with the invalid part.
    pub fn new(vendor: &str, class: &str) -> Result<Self, CdiNameError> {
        for part in [vendor, class] {
            if !is_vendor_or_class(part) {
                return Err(CdiNameError::VendorOrClass(part.to_owned()));
            }
        }
        Ok(Self { vendor: vendor.to_owned(), class: class.to_owned() })
    }

    /// Returns the vendor, by convention a domain name.
    #[must_use]
    pub fn vendor(&self) -> &str {
        &self.vendor
    }

    /// Returns the class.
    #[must_use]
    pub fn class(&self) -> &str {
        &self.class
    }

    /// Returns the qualified name of a device of this kind.
    #[must_use]
    pub fn device(&self, name: DeviceName) -> QualifiedName {
        QualifiedName { kind: self.clone(), name }
    }
}

impl fmt::Display for CdiKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.vendor, self.class)
    }
}

impl FromStr for CdiKind {
    type Err = CdiNameError;

    fn from_str(text: &str) -> Result<Self, CdiNameError> {
        let (vendor, class) =
            text.split_once('/').ok_or_else(|| CdiNameError::NotAKind(text.to_owned()))?;
        Self::new(vendor, class)
    }
}

impl TryFrom<String> for CdiKind {
    type Error = CdiNameError;

    fn try_from(text: String) -> Result<Self, CdiNameError> {
        text.parse()
    }
}

impl From<CdiKind> for String {
    fn from(kind: CdiKind) -> Self {
        kind.to_string()
    }
}

/// Name of a device within its kind.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DeviceName(String);

impl DeviceName {
    /// Returns the name as text.
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
    type Err = CdiNameError;

    fn from_str(text: &str) -> Result<Self, CdiNameError> {
        if !is_device_name(text) {
            return Err(CdiNameError::Device(text.to_owned()));
        }
        Ok(Self(text.to_owned()))
    }
}

impl TryFrom<String> for DeviceName {
    type Error = CdiNameError;

    fn try_from(text: String) -> Result<Self, CdiNameError> {
        text.parse()
    }
}

impl From<DeviceName> for String {
    fn from(name: DeviceName) -> Self {
        name.0
    }
}

/// Qualified device name `<vendor>/<class>=<device>`, which the kubelet passes to the container
/// runtime.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct QualifiedName {
    kind: CdiKind,
    name: DeviceName,
}

impl QualifiedName {
    /// Returns the device's kind.
    #[must_use]
    pub fn kind(&self) -> &CdiKind {
        &self.kind
    }

    /// Returns the device's name within its kind.
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
    type Err = CdiNameError;

    fn from_str(text: &str) -> Result<Self, CdiNameError> {
        let (kind, name) =
            text.split_once('=').ok_or_else(|| CdiNameError::NotQualified(text.to_owned()))?;
        Ok(Self { kind: kind.parse()?, name: name.parse()? })
    }
}

impl TryFrom<String> for QualifiedName {
    type Error = CdiNameError;

    fn try_from(text: String) -> Result<Self, CdiNameError> {
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
    fn qualified_name_round_trips() {
        let text = "k8s.gpu.tessera.dev/claim=0a1b-2c3d";
        let name: QualifiedName = text.parse().expect("a qualified name");
        assert_eq!((name.kind().vendor(), name.kind().class()), ("k8s.gpu.tessera.dev", "claim"));
        assert_eq!(name.to_string(), text);
    }

    #[test]
    fn rejects_names_that_runtimes_reject() {
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
            assert!(kind.parse::<CdiKind>().is_err(), "{kind:?}");
        }
        for device in ["", "-a", "a-", "a b", "_a", "a/b", "ä", "../x"] {
            assert!(device.parse::<DeviceName>().is_err(), "{device:?}");
        }
        for name in ["vendor/class", "vendor/class=", "=x", "vendor/class=a=b"] {
            assert!(name.parse::<QualifiedName>().is_err(), "{name:?}");
        }
    }
}
