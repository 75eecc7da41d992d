//! Device classes and selectors.

use std::sync::Arc;

use k8s_openapi::api::resource::v1::DeviceClassConfiguration;
use tessera_api::names::DeviceClassName;

use crate::selector::{CompiledSelector, SelectorError};

/// A DeviceClass.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceClass {
    /// Name of the class.
    pub name: DeviceClassName,
    /// Selectors that must all match.
    pub selectors: Vec<DeviceSelector>,
    /// Configurations in the order of the spec. Those of other drivers are ignored.
    pub configs: Vec<DeviceClassConfiguration>,
}

/// Source of a device selector.
///
/// It is compiled when the first device is tested, so that an unused selector costs nothing. A
/// compile error has no effect before that.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DeviceSelector {
    /// The CEL source; empty for a selector that is not CEL.
    pub expression: Arc<str>,
}

impl DeviceSelector {
    /// Returns true if the selector has a type of a later API version.
    pub fn is_unknown(&self) -> bool {
        self.expression.is_empty()
    }

    /// Creates a selector of an unknown type (not CEL). It matches no device.
    pub fn unknown() -> Self {
        Self { expression: "".into() }
    }

    /// Creates a selector from a CEL expression.
    pub fn new(expression: &str) -> Self {
        Self { expression: expression.into() }
    }

    /// Returns the compiled selector. Compiled programs are cached and shared by source.
    ///
    /// # Errors
    /// Returns an error if the expression does not compile or the selector is not CEL.
    pub fn compiled(&self) -> Result<Arc<CompiledSelector>, SelectorError> {
        self.compiled_in(&mut 0)
    }

    /// Like [`compiled`](Self::compiled), and charges `steps` for compiling. A cache hit is free.
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
