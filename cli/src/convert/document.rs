//! Documents of a manifest: parsed twice, as values and as text that is edited in place.
//!
//! An edit is checked: the text that results must have the expected value. If the editor cannot
//! apply a patch, as with an alias that stands for a container, the document is written anew,
//! without its comments.

use std::str::FromStr;

use json_patch::{Patch, PatchOperation};
use serde_json::Value;
use yaml_edit::{Mapping, YamlNode};

use super::{ManifestFile, kinds};
use crate::yaml;

/// Error returned for a document that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{file}: document {number} is neither YAML nor JSON")]
pub struct DocumentError {
    /// The file.
    file: String,
    /// Number of the document, from 1.
    number: usize,
    /// The cause.
    source: Box<serde_saphyr::Error>,
}

/// A document.
#[derive(Debug, Clone)]
pub(super) struct Document {
    text: String,
    value: Value,
}

impl Document {
    /// Returns the documents of a file.
    pub(super) fn all(file: &ManifestFile) -> Result<Vec<Self>, DocumentError> {
        let pieces = pieces(&file.text);
        let read = |(index, text): (usize, String)| {
            let value = yaml::from_str(&text).map_err(|source| DocumentError {
                file: file.name.clone(),
                number: index + 1,
                source: Box::new(source),
            })?;
            Ok(Self { text, value })
        };
        pieces.into_iter().enumerate().map(read).collect()
    }

    /// Returns the objects: the document, or the items of a list.
    pub(super) fn objects(&self) -> Vec<Value> {
        self.places().into_iter().map(|(_, object)| object).collect()
    }

    /// Returns the objects with their places in the document.
    pub(super) fn places(&self) -> Vec<(Vec<String>, Value)> {
        let is_list = self.value["kind"] == "List";
        match self.value["items"].as_array().filter(|_| is_list) {
            None if self.value.is_object() => vec![(Vec::new(), self.value.clone())],
            None => Vec::new(),
            Some(items) => {
                let place = |index: usize| vec!["items".to_owned(), index.to_string()];
                items.iter().enumerate().map(|(i, item)| (place(i), item.clone())).collect()
            }
        }
    }

    pub(super) fn into_text(self) -> String {
        self.text
    }

    /// Applies a patch to the pod template at this path. Returns false if comments are lost.
    pub(super) fn patch(&mut self, path: &[String], patch: &Patch) -> bool {
        if let Some(template) = self.value.pointer_mut(&kinds::pointer(path)) {
            // The patch was made from this value.
            let applied = json_patch::patch(template, &patch.0);
            debug_assert!(applied.is_ok(), "{applied:?}");
        }
        let edited = edited(&self.text, path, patch);
        let is_right = |text: &String| yaml::from_str(text).ok() == Some(self.value.clone());
        match edited.filter(is_right) {
            Some(text) => {
                self.text = text;
                true
            }
            None => {
                self.text = to_yaml(&self.value).unwrap_or_default();
                false
            }
        }
    }
}

/// Returns the value as a YAML document.
pub(super) fn to_yaml(value: &Value) -> Option<String> {
    serde_saphyr::to_string(value).ok()
}

/// Splits a text at its document markers. Comments before the first marker stay with the first
/// document; documents without content are left out.
fn pieces(text: &str) -> Vec<String> {
    let (mut pieces, mut piece) = (Vec::new(), String::new());
    for line in text.split_inclusive('\n') {
        let marker = line
            .strip_prefix("---")
            .filter(|rest| rest.is_empty() || rest.starts_with(char::is_whitespace));
        let Some(rest) = marker else {
            piece.push_str(line);
            continue;
        };
        if has_content(&piece) {
            pieces.push(std::mem::take(&mut piece));
        }
        if !rest.trim().is_empty() {
            piece.push_str(rest.trim_start());
        }
    }
    pieces.extend(Some(piece).filter(|piece| has_content(piece)));
    pieces
}

fn has_content(piece: &str) -> bool {
    piece.lines().map(str::trim).any(|line| !line.is_empty() && !line.starts_with('#'))
}

/// Returns the text with the patch applied; `None` if the editor cannot apply it.
fn edited(text: &str, path: &[String], patch: &Patch) -> Option<String> {
    let file = yaml_edit::YamlFile::from_str(text).ok()?;
    let root = file.documents().next()?.as_mapping()?;
    let is_json = text.trim_start().starts_with('{');
    for operation in &patch.0 {
        let tokens = operation.path().tokens().map(|token| token.decoded().into_owned());
        let full: Vec<_> = path.iter().cloned().chain(tokens).collect();
        let (last, parents) = full.split_last()?;
        let parent = find(&root, parents)?;
        match operation {
            PatchOperation::Remove(_) => {
                parent.as_mapping()?.remove(last.as_str())?;
            }
            PatchOperation::Add(add) if last == "-" => {
                let list = parent.as_sequence()?;
                list.push(node(&add.value, list.is_flow_style(), is_json)?);
            }
            PatchOperation::Add(add) => set(parent.as_mapping()?, last, &add.value, is_json)?,
            PatchOperation::Replace(replace) => {
                set(parent.as_mapping()?, last, &replace.value, is_json)?;
            }
            PatchOperation::Move(_) | PatchOperation::Copy(_) | PatchOperation::Test(_) => {
                return None;
            }
        }
    }
    Some(file.to_string())
}

fn set(mapping: &Mapping, key: &str, value: &Value, is_json: bool) -> Option<()> {
    match value.as_str() {
        Some(text) => mapping.set(key, text),
        None => mapping.set(key, node(value, mapping.is_flow_style(), is_json)?),
    }
    Some(())
}

/// Returns the node at a path of field names and indices.
fn find(root: &Mapping, path: &[String]) -> Option<YamlNode> {
    let mut node = YamlNode::Mapping(root.clone());
    for field in path {
        node = match &node {
            YamlNode::Mapping(mapping) => mapping.get(field.as_str())?,
            YamlNode::Sequence(sequence) => sequence.get(field.parse().ok()?)?,
            _ => return None,
        };
    }
    Some(node)
}

/// Returns a list or mapping as a node in the style of its surroundings.
fn node(value: &Value, in_flow: bool, is_json: bool) -> Option<YamlNode> {
    let text = match (is_json, in_flow) {
        (true, _) => value.to_string(),
        (false, true) => flow(value),
        (false, false) => to_yaml(value)?,
    };
    let document = yaml_edit::Document::from_str(&text).ok()?;
    let mapping = document.as_mapping().map(YamlNode::Mapping);
    mapping.or_else(|| document.as_sequence().map(YamlNode::Sequence))
}

/// Returns the value in flow style, with quotes only where they are needed.
fn flow(value: &Value) -> String {
    match value {
        Value::Object(fields) => {
            let fields: Vec<_> =
                fields.iter().map(|(name, value)| format!("{name}: {}", flow(value))).collect();
            format!("{{{}}}", fields.join(", "))
        }
        Value::Array(values) => {
            format!("[{}]", values.iter().map(flow).collect::<Vec<_>>().join(", "))
        }
        Value::String(text) if is_plain(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Returns true for names, which need no quotes: a letter first, and no word that YAML reads as
/// another type.
fn is_plain(text: &str) -> bool {
    let begins = text.starts_with(|c: char| c.is_ascii_lowercase());
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    let reserved = ["true", "false", "null", "yes", "no", "on", "off", "y", "n"];
    begins && text.chars().all(is_name) && !reserved.contains(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_split_at_markers_only() {
        let text = "# head\n---\n# first\na: |\n  ---\n  text\n--- # second\nb: ---x\n---\n\n---\n# tail\n";
        let pieces = pieces(text);
        assert_eq!(pieces.len(), 2, "{pieces:?}");
        assert_eq!(pieces[0], "# head\n# first\na: |\n  ---\n  text\n");
        assert_eq!(pieces[1], "# second\nb: ---x\n");
    }
}
