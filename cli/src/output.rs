//! Output formats: tables for people, JSON and YAML for programs.

use std::fmt::Write as _;

use clap::ValueEnum;
use serde::Serialize;

use crate::terminal::{escape, escape_json};

/// Longest line of text output, in characters, where it can be broken.
pub(crate) const LINE_WIDTH: usize = 100;

/// Format of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum OutputFormat {
    /// Text for people.
    #[default]
    Table,
    /// One JSON document.
    Json,
    /// One YAML document.
    Yaml,
}

/// Error returned when a result cannot be serialized.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    /// The result cannot be written as JSON.
    #[error("cannot write the result as JSON")]
    Json(#[from] serde_json::Error),
    /// The result cannot be written as YAML.
    #[error("cannot write the result as YAML")]
    Yaml(#[from] serde_saphyr::ser::Error),
}

/// Returns the result in that format, safe to print on a terminal; `table` renders the text for
/// people.
///
/// # Errors
/// The format cannot represent a value of the result.
pub fn render<T: Serialize>(
    result: &T,
    format: OutputFormat,
    table: impl FnOnce(&T) -> String,
) -> Result<String, OutputError> {
    Ok(match format {
        OutputFormat::Table => escape(&table(result)).into_owned(),
        OutputFormat::Json => {
            escape_json(&serde_json::to_string_pretty(result)?).into_owned() + "\n"
        }
        OutputFormat::Yaml => serde_saphyr::to_string(result)?,
    })
}

/// Rows in aligned columns, as kubectl prints them: three spaces between columns, none at the end
/// of a line.
#[derive(Debug, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
    right_aligned: Vec<usize>,
}

impl Table {
    /// Returns a table with these headers, or without a header line.
    pub fn new(headers: Option<&[&str]>) -> Self {
        let headers = headers.map(|names| names.iter().map(|&name| name.to_owned()).collect());
        Self { rows: headers.into_iter().collect(), right_aligned: Vec::new() }
    }

    /// Aligns these columns to the right.
    #[must_use]
    pub fn align_right(self, columns: &[usize]) -> Self {
        Self { right_aligned: columns.to_vec(), ..self }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// Returns the text, each line ended.
    pub fn render(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
                // Writing to a String cannot fail.
                let _ = match self.right_aligned.contains(&column) {
                    true => write!(line, "{cell:>width$}   "),
                    false => write!(line, "{cell:<width$}   "),
                };
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

/// Breaks a text into lines of at most `width` characters, at spaces.
pub(crate) fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Returns a number with its noun: `1 pod`, `2 pods`.
pub(crate) fn count(number: usize, noun: &str) -> String {
    if number == 1 { format!("1 {noun}") } else { format!("{number} {noun}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_fit_their_widest_cell() {
        let mut table = Table::new(Some(&["NAME", "FREE"])).align_right(&[1]);
        table.row(vec!["├─ 0".to_owned(), "1Gi".to_owned()]);
        table.row(vec!["node-with-a-name".to_owned(), String::new()]);
        assert_eq!(
            table.render(),
            "NAME               FREE\n├─ 0                1Gi\nnode-with-a-name\n"
        );
    }

    #[test]
    fn first_line_is_data_without_headers() {
        let mut table = Table::new(None);
        table.row(vec!["a".to_owned(), "b".to_owned()]);
        assert_eq!(table.render(), "a   b\n");
    }

    #[test]
    fn wraps_at_spaces() {
        assert_eq!(wrap("one two three", 7), ["one two", "three"]);
        assert_eq!(wrap("a-long-word b", 4), ["a-long-word", "b"]);
    }
}
