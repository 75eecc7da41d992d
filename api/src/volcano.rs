//! PodGroup of the scheduler Volcano: the number of pods that it starts together.
//!
//! Fields as in `scheduling.volcano.sh/v1beta1` of Volcano 1.12; the others are ignored.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::ser::SerializeMap as _;
use serde::{Deserialize, Serialize, Serializer};

/// The PodGroup of Volcano.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct VolcanoPodGroup {
    /// Metadata.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// The wanted group.
    #[serde(default)]
    pub spec: VolcanoPodGroupSpec,
}

/// The wanted group.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolcanoPodGroupSpec {
    /// The number of pods that start together; none or at most 1 = each pod starts alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_member: Option<i32>,
}

impl k8s_openapi::Resource for VolcanoPodGroup {
    const API_VERSION: &'static str = "scheduling.volcano.sh/v1beta1";
    const GROUP: &'static str = "scheduling.volcano.sh";
    const KIND: &'static str = "PodGroup";
    const VERSION: &'static str = "v1beta1";
    const URL_PATH_SEGMENT: &'static str = "podgroups";
    type Scope = k8s_openapi::NamespaceResourceScope;
}

impl k8s_openapi::Metadata for VolcanoPodGroup {
    type Ty = ObjectMeta;

    fn metadata(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn metadata_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

impl Serialize for VolcanoPodGroup {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use k8s_openapi::Resource as _;
        let mut object = serializer.serialize_map(None)?;
        object.serialize_entry("apiVersion", Self::API_VERSION)?;
        object.serialize_entry("kind", Self::KIND)?;
        object.serialize_entry("metadata", &self.metadata)?;
        object.serialize_entry("spec", &self.spec)?;
        object.end()
    }
}
