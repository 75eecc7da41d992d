//! Device classes and selectors.

use std::sync::Arc;

use k8s_openapi::api::resource::v1::DeviceClassConfiguration;
use tessera_api::names::DeviceClassName;

use crate::selector::{CompiledSelector, SelectorError};

/// A DeviceClass.
#[derive(Debug, Clone)]
pub struct DeviceClass {
    /// Its name.
    pub name: DeviceClassName,
    /// All must match.
    pub selectors: Vec<Selector>,
    /// Its configurations, in the order given; those of other drivers are left alone.
    pub configs: Vec<DeviceClassConfiguration>,
}

/// A selector: its source, and what compiling it gave. The error is kept: it counts only once a device is looked at.
#[derive(Debug, Clone)]
pub struct Selector {
    /// The CEL source.
    pub expression: Arc<str>,
    /// The compiled selector.
    pub compiled: Result<Arc<CompiledSelector>, SelectorError>,
}

/// Two selectors are one if they read the same: the rest follows.
impl PartialEq for Selector {
    fn eq(&self, other: &Self) -> bool {
        self.expression == other.expression
    }
}

impl Eq for Selector {}

impl std::hash::Hash for Selector {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.expression.hash(state);
    }
}

impl Selector {
    /// Whether it is a selector of a kind of the future.
    pub fn is_unknown(&self) -> bool {
        self.expression.is_empty() && self.compiled.is_err()
    }

    /// A selector that is not CEL: a kind of the future, which never selects.
    pub fn unknown() -> Self {
        let error = SelectorError::Unsupported { construct: "something other than CEL".to_owned() };
        Self { expression: "".into(), compiled: Err(error) }
    }

    /// Compiles an expression. Cheap for an expression seen before: programs are shared.
    pub fn new(expression: &str) -> Self {
        Self { expression: expression.into(), compiled: CompiledSelector::cached(expression) }
    }
}
