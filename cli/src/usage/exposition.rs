//! Samples of the Prometheus text format, as far as the driver's metrics need it.

use std::collections::BTreeMap;

/// One sample.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Sample {
    /// Name of the metric, with its suffix (`_total`).
    pub(super) name: String,
    pub(super) labels: BTreeMap<String, String>,
    pub(super) value: f64,
}

/// Returns the samples of a text. Comments and lines that are no samples are skipped.
pub(super) fn samples(text: &str) -> impl Iterator<Item = Sample> {
    text.lines().filter(|line| !line.starts_with('#')).filter_map(sample)
}

fn sample(line: &str) -> Option<Sample> {
    let end = line.find(['{', ' '])?;
    let (name, rest) = line.split_at(end);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(inside) => labels(inside)?,
        None => (BTreeMap::new(), rest),
    };
    // A timestamp or an exemplar may follow the value.
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Sample { name: name.to_owned(), labels, value })
}

/// Returns the labels after `{`, and the text after `}`.
fn labels(mut rest: &str) -> Option<(BTreeMap<String, String>, &str)> {
    let mut labels = BTreeMap::new();
    loop {
        if let Some(after) = rest.strip_prefix('}') {
            return Some((labels, after));
        }
        let (name, after) = rest.split_once("=\"")?;
        let (value, after) = quoted(after)?;
        labels.insert(name.to_owned(), value);
        rest = after.strip_prefix(',').unwrap_or(after);
    }
}

/// Returns the value before the closing quote, without escapes, and the text after the quote.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match characters.next()?.1 {
                'n' => value.push('\n'),
                escaped => value.push(escaped),
            },
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_have_names_labels_and_values() {
        let text = "# HELP a Help.\n# TYPE a gauge\na{x=\"1\",y=\"q\\\"\\\\\\n}\"} 2.5 17\nb 3\nc_total{} 4\n\
                    broken{x=\"1} 2\nbroken\n# EOF\n";
        let sample = |name: &str, labels: &[(&str, &str)], value| Sample {
            name: name.to_owned(),
            labels: labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            value,
        };
        let expected = [
            sample("a", &[("x", "1"), ("y", "q\"\\\n}")], 2.5),
            sample("b", &[], 3.0),
            sample("c_total", &[], 4.0),
        ];
        assert_eq!(samples(text).collect::<Vec<_>>(), expected);
    }
}
