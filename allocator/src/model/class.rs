//! Device classes and selectors.

use std::sync::Arc;

use k8s_openapi::api::resource::v1::DeviceClassConfiguration;
use tessera_api::names::DeviceClassName;

use crate::selector::{CompiledSelector, SelectorError};

/// A DeviceClass.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceClass {
    /// Its name.
    pub name: DeviceClassName,
    /// All must match.
    pub selectors: Vec<Selector>,
    /// Its configurations, in the order given; those of other drivers are left alone.
    pub configs: Vec<DeviceClassConfiguration>,
}

/// A selector: its source. It is compiled when a device is looked at, so that what nobody waits for
/// costs nothing; an error counts only then.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Selector {
    /// The CEL source; empty for a selector that is not CEL.
    pub expression: Arc<str>,
}

impl Selector {
    /// Whether it is a selector of a kind of the future.
    pub fn is_unknown(&self) -> bool {
        self.expression.is_empty()
    }

    /// A selector that is not CEL: a kind of the future, which never selects.
    pub fn unknown() -> Self {
        Self { expression: "".into() }
    }

    /// A selector of that source.
    pub fn new(expression: &str) -> Self {
        Self { expression: expression.into() }
    }

    /// The compiled selector. Cheap for an expression seen before: programs are shared.
    ///
    /// # Errors
    /// It does not compile.
    pub fn compiled(&self) -> Result<Arc<CompiledSelector>, SelectorError> {
        self.compiled_in(&mut 0)
    }

    /// As [`compiled`](Self::compiled); compiling takes of `steps`, a look-up does not.
    pub(crate) fn compiled_in(
        &self,
        steps: &mut u64,
    ) -> Result<Arc<CompiledSelector>, SelectorError> {
        if self.is_unknown() {
            return Err(SelectorError::Unsupported {
                construct: "something other than CEL".to_owned(),
            });
        }
        CompiledSelector::cached_in(&self.expression, steps)
    }
}
