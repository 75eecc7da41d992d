//! Discovery: groups, resources, version, and the part of OpenAPI that kubectl requests.

use serde_json::{Map, Value, json};

use super::kind::{KINDS, Kind, StatusSubresource};

/// Kubernetes version of the fake API server.
pub const VERSION: &str = "v1.37.1";

/// Returns the document at a discovery path, or `None` for other paths.
pub(crate) fn answer(path: &str, host: &str) -> Option<Value> {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    match parts.as_slice() {
        ["version"] => Some(version()),
        ["api"] => Some(json!({
            "kind": "APIVersions", "versions": ["v1"],
            "serverAddressByClientCIDRs": [{"clientCIDR": "0.0.0.0/0", "serverAddress": host}],
        })),
        ["apis"] => Some(json!({
            "kind": "APIGroupList", "apiVersion": "v1",
            "groups": groups().iter().map(|group| self::group(group)).collect::<Vec<_>>(),
        })),
        ["api", version] => resources("", version),
        ["apis", group] if groups().contains(group) => {
            let mut answer = self::group(group);
            answer["kind"] = "APIGroup".into();
            answer["apiVersion"] = "v1".into();
            Some(answer)
        }
        ["apis", group, version] => resources(group, version),
        ["openapi", "v3"] => Some(openapi_index()),
        ["openapi", "v3", "api", version] => openapi("", version),
        ["openapi", "v3", "apis", group, version] => openapi(group, version),
        _ => None,
    }
}

fn version() -> Value {
    json!({
        "major": "1", "minor": "37", "gitVersion": VERSION, "gitCommit": "", "gitTreeState": "clean",
        "buildDate": "", "goVersion": "", "compiler": "rustc", "platform": "linux/amd64",
        "emulationMajor": "1", "emulationMinor": "37", "minCompatibilityMajor": "1", "minCompatibilityMinor": "36",
    })
}

fn groups() -> Vec<&'static str> {
    let mut groups: Vec<&str> =
        KINDS.iter().map(|kind| kind.group).filter(|group| !group.is_empty()).collect();
    groups.dedup();
    groups
}

fn group(name: &str) -> Value {
    let version = KINDS.iter().find(|kind| kind.group == name).map_or("v1", |kind| kind.version);
    let version = json!({"groupVersion": format!("{name}/{version}"), "version": version});
    json!({"name": name, "versions": [version], "preferredVersion": version})
}

fn in_version<'a>(group: &'a str, version: &'a str) -> impl Iterator<Item = &'static Kind> + 'a {
    KINDS.iter().filter(move |kind| kind.group == group && kind.version == version)
}

fn resources(group: &str, version: &str) -> Option<Value> {
    let mut list = Vec::new();
    for kind in in_version(group, version) {
        list.push(json!({
            "name": kind.plural, "singularName": kind.singular, "namespaced": kind.namespaced, "kind": kind.kind,
            "verbs": ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"],
            "shortNames": kind.short,
        }));
        for (name, sub_kind, verbs) in subresources(kind) {
            list.push(json!({
                "name": format!("{}/{name}", kind.plural), "singularName": "", "namespaced": kind.namespaced,
                "kind": sub_kind, "verbs": verbs,
            }));
        }
    }
    let group_version =
        if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
    (!list.is_empty()).then(|| {
        json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": list})
    })
}

fn subresources(kind: &Kind) -> Vec<(&'static str, &'static str, Vec<&'static str>)> {
    let mut list = Vec::new();
    if kind.status != StatusSubresource::None {
        list.push(("status", kind.kind, vec!["get", "patch", "update"]));
    }
    match kind.plural {
        "pods" => {
            list.push(("binding", "Binding", vec!["create"]));
            list.push(("eviction", "Eviction", vec!["create"]));
            list.push(("log", "Pod", vec!["get"]));
            list.push(("proxy", "PodProxyOptions", vec!["get"]));
        }
        "namespaces" => list.push(("finalize", "Namespace", vec!["update"])),
        _ => {}
    }
    list
}

fn openapi_index() -> Value {
    let mut paths = Map::new();
    for kind in KINDS {
        let path = root(kind);
        paths.insert(
            path.clone(),
            json!({"serverRelativeURL": format!("/openapi/v3/{path}?hash={VERSION}")}),
        );
    }
    json!({"paths": paths})
}

fn root(kind: &Kind) -> String {
    if kind.group.is_empty() {
        format!("api/{}", kind.version)
    } else {
        format!("apis/{}/{}", kind.group, kind.version)
    }
}

/// Returns enough for kubectl to detect server-side field validation; no schemas.
fn openapi(group: &str, version: &str) -> Option<Value> {
    let mut paths = Map::new();
    for kind in in_version(group, version) {
        let inside = if kind.namespaced { "namespaces/{namespace}/" } else { "" };
        let path = format!("/{}/{inside}{}/{{name}}", root(kind), kind.plural);
        let parameters: Vec<Value> = ["fieldValidation", "fieldManager", "dryRun"]
            .iter()
            .map(|name| json!({"name": name, "in": "query", "schema": {"type": "string"}}))
            .collect();
        let operation = json!({
            "parameters": parameters,
            "responses": {"200": {"description": "OK"}},
            "x-kubernetes-group-version-kind": {"group": kind.group, "version": kind.version, "kind": kind.kind},
        });
        paths.insert(path, json!({"patch": operation}));
    }
    (!paths.is_empty()).then(|| {
        json!({
            "openapi": "3.0.0", "info": {"title": "Kubernetes", "version": VERSION}, "paths": paths,
            "components": {"schemas": {}},
        })
    })
}
