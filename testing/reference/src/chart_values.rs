//! Page of the chart's values, from the comments of `values.yaml`.

use std::path::Path;

use anyhow::Context as _;

use crate::Page;
use crate::table::{code, header, table};

const VALUES: &str = "deploy/chart/tessera/values.yaml";

pub(crate) fn chart_values(root: &Path) -> anyhow::Result<Page> {
    let source = std::fs::read_to_string(root.join(VALUES))
        .with_context(|| format!("cannot read {VALUES}"))?;
    let rows: Vec<Vec<String>> = keys(&source)?
        .into_iter()
        .map(|key| vec![code(&key.path), code(&key.default), key.meaning])
        .collect();
    let mut text = header("Chart values", VALUES);
    text.push_str("A misspelt key is refused (`values.schema.json`).\n\n");
    text.push_str(&table(&["Value", "Default", "Meaning"], &rows));
    Ok(Page { path: "docs/reference/chart-values.md", text })
}

/// One key.
#[derive(Debug, PartialEq, Eq)]
struct Key {
    path: String,
    default: String,
    meaning: String,
}

/// Returns the keys of a YAML mapping in block style with the comments above and beside them. A
/// list is the default of its key.
fn keys(source: &str) -> anyhow::Result<Vec<Key>> {
    let mut keys: Vec<Key> = Vec::new();
    let mut parents: Vec<(usize, String)> = Vec::new();
    let mut comment: Vec<String> = Vec::new();
    for line in source.lines() {
        let content = line.trim_start();
        let indent = line.len() - content.len();
        if let Some(text) = content.strip_prefix('#') {
            comment.push(text.trim().to_owned());
        } else if content.is_empty() {
            comment.clear();
        } else if let Some(entry) = content.strip_prefix("- ") {
            let key = keys.last_mut().context("a list without a key")?;
            let separator = if key.default.is_empty() { "" } else { ", " };
            key.default.push_str(&format!("{separator}{entry}"));
        } else {
            let (name, rest) =
                content.split_once(':').with_context(|| format!("not a key: {line}"))?;
            let (value, beside) = rest.split_once(" #").unwrap_or((rest, ""));
            parents.retain(|(depth, _)| *depth < indent);
            let above = parents.iter().map(|(_, name)| name.as_str());
            let path = above.chain([name]).collect::<Vec<_>>().join(".");
            comment.extend((!beside.is_empty()).then(|| beside.trim().to_owned()));
            let meaning = std::mem::take(&mut comment).join(" ");
            keys.push(Key { path, default: value.trim().to_owned(), meaning });
            parents.push((indent, name.to_owned()));
        }
    }
    anyhow::ensure!(!keys.is_empty(), "{VALUES} has no keys");
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;

    fn paths(value: &Value, above: &str, all: &mut BTreeSet<String>) {
        for (name, value) in value.as_object().into_iter().flatten() {
            let path = if above.is_empty() { name.clone() } else { format!("{above}.{name}") };
            all.insert(path.clone());
            paths(value, &path, all);
        }
    }

    #[test]
    fn keys_of_the_chart_are_those_of_a_yaml_parser() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let source = std::fs::read_to_string(root.join(VALUES)).unwrap();
        let value: Value = serde_saphyr::from_str(&source).unwrap();
        let mut parsed = BTreeSet::new();
        paths(&value, "", &mut parsed);
        let keys = keys(&source).unwrap();
        // Below a mapping in flow style there are no keys of their own.
        let flow = keys.iter().filter(|key| key.default.starts_with('{')).map(|key| &key.path);
        for path in flow {
            parsed.retain(|parsed| !parsed.starts_with(&format!("{path}.")));
        }
        let found: BTreeSet<String> = keys.into_iter().map(|key| key.path).collect();
        assert_eq!(found, parsed);
    }

    #[test]
    fn comments_above_and_beside_a_key_are_its_meaning() {
        let source =
            "# First.\n# Second.\na: 1\n\n# Lost.\n\nb:\n  c: \"\" # Beside.\n  d:\n  - x\n  - y\n";
        let found = keys(source).unwrap();
        let key = |path: &str, default: &str, meaning: &str| Key {
            path: path.to_owned(),
            default: default.to_owned(),
            meaning: meaning.to_owned(),
        };
        assert_eq!(
            found,
            [
                key("a", "1", "First. Second."),
                key("b", "", ""),
                key("b.c", "\"\"", "Beside."),
                key("b.d", "x, y", ""),
            ]
        );
    }
}
