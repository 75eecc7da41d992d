//! GpuDefaults: parameters of namespaces for claims that leave fields open (ADR 125).
//!
//! The claims of a namespace carry its parameters, so that whatever plans or writes an allocation
//! has both. An allocation contains what it was made with, so a change of the defaults concerns
//! later allocations only.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_api::GpuConfig;
use tessera_api::defaults::{GPU_DEFAULTS_NAME, GpuDefaults};
use tessera_api::names::Namespace;

use crate::convert::{ConvertError, Subject};
use crate::index::Index;

/// The parameters of each namespace that has some.
pub(crate) type Defaults = BTreeMap<Namespace, Arc<GpuConfig>>;

impl Index {
    /// Takes over a GpuDefaults. Those of another name than `default` are ignored. Returns true if
    /// the parameters have changed.
    ///
    /// # Errors
    /// It cannot be read. The last readable version stays.
    pub fn apply_defaults(&mut self, object: &GpuDefaults) -> Result<bool, ConvertError> {
        let Some(namespace) = namespace_of(object) else { return Ok(false) };
        let subject = Subject::new("GpuDefaults", object.metadata.name.as_ref());
        let config = object.config().map_err(subject.field("spec.parameters"))?;
        Ok(self.set_defaults(namespace, Some(Arc::new(config))))
    }

    /// Removes a deleted GpuDefaults. Returns true if its parameters counted.
    pub fn remove_defaults(&mut self, object: &GpuDefaults) -> bool {
        namespace_of(object).is_some_and(|namespace| self.set_defaults(namespace, None))
    }

    fn set_defaults(&mut self, namespace: Namespace, config: Option<Arc<GpuConfig>>) -> bool {
        if self.defaults.get(&namespace) == config.as_ref() {
            return false;
        }
        for uid in self.claims_in(&namespace) {
            if let Some(entry) = self.claims.get_mut(&uid) {
                Arc::make_mut(&mut entry.claim).defaults.clone_from(&config);
            }
            let pods = self.pods_with(&uid);
            self.changed_pods.extend(pods);
        }
        match config {
            Some(config) => drop(self.defaults.insert(namespace, config)),
            None => drop(self.defaults.remove(&namespace)),
        }
        true
    }
}

/// Returns the namespace of the object whose name counts.
fn namespace_of(object: &GpuDefaults) -> Option<Namespace> {
    let metadata = &object.metadata;
    let counts = metadata.name.as_deref() == Some(GPU_DEFAULTS_NAME);
    metadata.namespace.as_deref().filter(|_| counts).and_then(|name| Namespace::new(name).ok())
}
