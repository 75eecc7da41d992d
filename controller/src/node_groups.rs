//! The file with the groups of nodes for which the controller asks a cluster autoscaler by
//! placeholder pods.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use tessera_api::names::{Namespace, NodeGroupName};

/// The most placeholder pods of a group that can be set.
const MAX_MAXIMUM: usize = 100;

/// Errors of the file.
#[derive(Debug, thiserror::Error)]
pub enum NodeGroupsError {
    /// The file cannot be read.
    #[error("cannot read --node-groups {}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// It is not YAML, has an unknown field, or lacks one.
    #[error("--node-groups {}: {problem}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The problem, with line and column.
        problem: String,
    },
    /// A field has a value that is not allowed.
    #[error("--node-groups {}: {field}: {problem}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
        /// The problem.
        problem: String,
    },
}

/// The groups of nodes, and how placeholder pods are made.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeGroups {
    /// Namespace of the placeholder pods.
    pub namespace: Namespace,
    /// Their image, whose program only waits.
    pub image: String,
    /// Their PriorityClass. They are deleted with it.
    pub priority_class_name: String,
    /// The groups, in the order in which they are preferred.
    pub groups: Vec<NodeGroup>,
}

/// A group of equal nodes that a cluster autoscaler extends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeGroup {
    /// Its name.
    pub name: NodeGroupName,
    /// Labels that the nodes of the group have and no others.
    pub node_selector: BTreeMap<String, String>,
    /// The most placeholder pods at the same time.
    pub maximum: usize,
}

/// The file as it is written.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    image: String,
    priority_class_name: String,
    groups: Vec<FileGroup>,
}

/// A group as it is written.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct FileGroup {
    name: String,
    node_selector: BTreeMap<String, String>,
    maximum: usize,
}

/// Reads the file. Placeholder pods are created in `namespace`.
///
/// # Errors
/// [`NodeGroupsError`], with the field.
pub fn read(path: &Path, namespace: &str) -> Result<NodeGroups, NodeGroupsError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| NodeGroupsError::Unreadable { path: path.to_owned(), source })?;
    let file: File = serde_saphyr::from_str(&text).map_err(|error| NodeGroupsError::Malformed {
        path: path.to_owned(),
        problem: error.to_string(),
    })?;
    checked(file, namespace).map_err(|(field, problem)| NodeGroupsError::Invalid {
        path: path.to_owned(),
        field,
        problem,
    })
}

/// Returns the settings, or the field that is wrong and the problem.
fn checked(file: File, namespace: &str) -> Result<NodeGroups, (String, String)> {
    let File { image, priority_class_name, groups } = file;
    let namespace =
        Namespace::new(namespace).map_err(|error| ("--namespace".into(), error.to_string()))?;
    for (field, value) in [("image", &image), ("priorityClassName", &priority_class_name)] {
        if value.is_empty() {
            return Err((field.to_owned(), "must not be empty".to_owned()));
        }
    }
    let mut names = BTreeSet::new();
    let checked = groups.into_iter().enumerate().map(|(index, group)| {
        let field = |name: &str| format!("groups[{index}].{name}");
        let name =
            NodeGroupName::new(&group.name).map_err(|error| (field("name"), error.to_string()))?;
        if !names.insert(name.clone()) {
            return Err((field("name"), format!("another group is named {name}, too")));
        }
        if group.node_selector.is_empty() {
            let problem = "must have the labels by which the nodes of the group are selected";
            return Err((field("nodeSelector"), problem.to_owned()));
        }
        if !(1..=MAX_MAXIMUM).contains(&group.maximum) {
            return Err((field("maximum"), format!("must be 1 to {MAX_MAXIMUM}")));
        }
        Ok(NodeGroup { name, node_selector: group.node_selector, maximum: group.maximum })
    });
    let groups = checked.collect::<Result<_, _>>()?;
    Ok(NodeGroups { namespace, image, priority_class_name, groups })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<NodeGroups, (String, String)> {
        checked(serde_saphyr::from_str(text).unwrap(), "tessera-system")
    }

    const HEAD: &str = "image: pause\npriorityClassName: low\ngroups:\n";

    #[test]
    fn groups_keep_their_order() {
        let text = format!(
            "{HEAD}- {{name: b, nodeSelector: {{pool: b}}, maximum: 3}}\n\
             - {{name: a, nodeSelector: {{pool: a}}, maximum: 1}}\n"
        );
        let groups = parsed(&text).unwrap().groups;
        let names: Vec<_> = groups.iter().map(|group| group.name.as_str()).collect();
        assert_eq!(names, ["b", "a"]);
        assert_eq!(groups[0].maximum, 3);
    }

    #[test]
    fn wrong_fields_are_named() {
        for (group, field) in [
            ("{name: A, nodeSelector: {pool: a}, maximum: 1}", "groups[1].name"),
            ("{name: first, nodeSelector: {pool: a}, maximum: 1}", "groups[1].name"),
            ("{name: a, nodeSelector: {}, maximum: 1}", "groups[1].nodeSelector"),
            ("{name: a, nodeSelector: {pool: a}, maximum: 0}", "groups[1].maximum"),
            ("{name: a, nodeSelector: {pool: a}, maximum: 101}", "groups[1].maximum"),
        ] {
            let first = "- {name: first, nodeSelector: {pool: b}, maximum: 1}";
            let error = parsed(&format!("{HEAD}{first}\n- {group}\n")).unwrap_err();
            assert_eq!(error.0, field, "{group}: {}", error.1);
        }
        let error = parsed("image: ''\npriorityClassName: low\ngroups: []\n").unwrap_err();
        assert_eq!(error.0, "image");
    }
}
