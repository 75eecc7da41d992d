//! Objects of the chart's CustomResourceDefinitions.

/// Implements the traits of Kubernetes' objects for a namespaced kind in `gpu.tessera.dev/v1alpha1`
/// with `metadata`, these fields, and those after `;` if they are set.
macro_rules! custom_resource {
    ($kind:ident, $plural:literal, [$($field:ident),*; $($optional:ident),*]) => {
        impl k8s_openapi::Resource for $kind {
            const API_VERSION: &'static str = crate::config::API_VERSION;
            const GROUP: &'static str = crate::names::DRIVER_NAME;
            const KIND: &'static str = stringify!($kind);
            const VERSION: &'static str = "v1alpha1";
            const URL_PATH_SEGMENT: &'static str = $plural;
            type Scope = k8s_openapi::NamespaceResourceScope;
        }

        impl k8s_openapi::Metadata for $kind {
            type Ty = ObjectMeta;

            fn metadata(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn metadata_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }

        impl serde::Serialize for $kind {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                use k8s_openapi::Resource as _;
                use serde::ser::SerializeMap as _;
                let mut object = serializer.serialize_map(None)?;
                object.serialize_entry("apiVersion", Self::API_VERSION)?;
                object.serialize_entry("kind", Self::KIND)?;
                object.serialize_entry("metadata", &self.metadata)?;
                $(object.serialize_entry(stringify!($field), &self.$field)?;)*
                $(if let Some(value) = &self.$optional {
                    object.serialize_entry(stringify!($optional), value)?;
                })*
                object.end()
            }
        }
    };
}

pub(crate) use custom_resource;
