//! Representations of objects sent to clients: complete, metadata only, or a table for kubectl.

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::kind::Kind;
use super::{meta, table};

/// Representation accepted by the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum View {
    Full,
    Metadata,
    Table,
}

impl View {
    /// Parses an Accept header. Unknown media types yield complete objects as JSON.
    pub(crate) fn from_accept(accept: &str) -> Self {
        if accept.contains("as=PartialObjectMetadata") {
            Self::Metadata
        } else if accept.contains("as=Table") {
            Self::Table
        } else {
            Self::Full
        }
    }

    /// Returns one object.
    pub(crate) fn object(self, kind: &Kind, stored: &Value) -> Value {
        match self {
            Self::Full => present(kind, stored),
            Self::Metadata => {
                json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": stored["metadata"]})
            }
            Self::Table => table::render(kind, std::iter::once(stored), Map::new()),
        }
    }

    /// Returns a serialized list.
    pub(crate) fn list<'a>(
        self,
        kind: &Kind,
        objects: impl Iterator<Item = &'a Value> + Clone,
        metadata: Map<String, Value>,
    ) -> Result<Vec<u8>, ApiError> {
        let body = match self {
            Self::Full if kind.present.is_some() => {
                let objects: Vec<Value> = objects.map(|object| present(kind, object)).collect();
                return self.written(
                    &format!("{}List", kind.kind),
                    &kind.api_version(),
                    metadata,
                    objects.iter(),
                );
            }
            Self::Full => {
                return self.written(
                    &format!("{}List", kind.kind),
                    &kind.api_version(),
                    metadata,
                    objects,
                );
            }
            Self::Metadata => {
                let items: Vec<Value> = objects.map(|object| self.object(kind, object)).collect();
                json!({
                    "kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1",
                    "metadata": metadata, "items": items,
                })
            }
            Self::Table => table::render(kind, objects, metadata),
        };
        serde_json::to_vec(&body).map_err(|error| ApiError::internal(error.to_string()))
    }

    fn written<'a>(
        self,
        kind: &str,
        api_version: &str,
        metadata: Map<String, Value>,
        objects: impl Iterator<Item = &'a Value>,
    ) -> Result<Vec<u8>, ApiError> {
        let items: Vec<Item<'_>> = objects.map(Item).collect();
        serde_json::to_vec(&List { kind, api_version, metadata, items })
            .map_err(|error| ApiError::internal(error.to_string()))
    }

    /// Returns a bookmark, which has only a resource version.
    pub(crate) fn bookmark(self, kind: &Kind, revision: u64, end_of_initial: bool) -> Value {
        let mut metadata =
            json!({"resourceVersion": revision.to_string(), "creationTimestamp": null});
        if end_of_initial {
            metadata["annotations"] = json!({"k8s.io/initial-events-end": "true"});
        }
        match self {
            Self::Full => {
                let mut bookmark = json!({"kind": kind.kind, "apiVersion": kind.api_version(), "metadata": metadata});
                // Typed clients decode bookmarks too, and a pod without containers is invalid.
                match kind.plural {
                    "pods" => bookmark["spec"] = json!({"containers": null}),
                    "resourceclaims" | "deviceclasses" => bookmark["spec"] = json!({}),
                    _ => {}
                }
                bookmark
            }
            Self::Metadata => {
                json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata})
            }
            Self::Table => json!({
                "kind": "Table", "apiVersion": "meta.k8s.io/v1", "columnDefinitions": [], "rows": [],
                "metadata": metadata,
            }),
        }
    }
}

/// Returns the stored object in the requested version.
pub(crate) fn present(kind: &Kind, stored: &Value) -> Value {
    match kind.present {
        Some(present) => present(stored.clone()),
        None => stored.clone(),
    }
}

#[derive(Serialize)]
struct List<'a> {
    kind: &'a str,
    #[serde(rename = "apiVersion")]
    api_version: &'a str,
    metadata: Map<String, Value>,
    items: Vec<Item<'a>>,
}

/// Item of a list, without kind and apiVersion.
struct Item<'a>(&'a Value);

impl Serialize for Item<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Some(map) = self.0.as_object() else { return self.0.serialize(serializer) };
        let mut out = serializer.serialize_map(None)?;
        for (key, value) in map.iter().filter(|(key, _)| *key != "kind" && *key != "apiVersion") {
            out.serialize_entry(key, value)?;
        }
        out.end()
    }
}

/// Returns the metadata of a list.
pub(crate) fn list_metadata(revision: u64) -> Map<String, Value> {
    Map::from_iter([("resourceVersion".to_owned(), Value::String(revision.to_string()))])
}

/// Returns the `Status` that confirms a deletion.
pub(crate) fn deleted(kind: &Kind, object: &Value) -> Value {
    let mut details =
        json!({"name": meta::name(object), "kind": kind.plural, "uid": meta::uid(object)});
    if !kind.group.is_empty() {
        details["group"] = kind.group.into();
    }
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details})
}
