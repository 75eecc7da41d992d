//! Tables for people, JSON and YAML for programs.

use std::fmt::Write as _;

use clap::ValueEnum;
use serde::Serialize;

/// How results are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Format {
    /// For people.
    #[default]
    Table,
    /// One JSON document.
    Json,
    /// One YAML document.
    Yaml,
}

/// Why a result could not be written as data.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    /// As JSON.
    #[error("the result cannot be written as JSON")]
    Json(#[from] serde_json::Error),
    /// As YAML.
    #[error("the result cannot be written as YAML")]
    Yaml(#[from] serde_saphyr::ser::Error),
}

/// Writes a result as asked for; `table` makes the text for people.
///
/// # Errors
/// The result holds something that the format has not.
pub fn render<T: Serialize>(
    result: &T,
    format: Format,
    table: impl FnOnce(&T) -> String,
) -> Result<String, OutputError> {
    Ok(match format {
        Format::Table => table(result),
        Format::Json => serde_json::to_string_pretty(result)? + "\n",
        Format::Yaml => serde_saphyr::to_string(result)?,
    })
}

/// Rows in columns, as kubectl aligns them: three spaces between columns, none at a line's end.
#[derive(Debug, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these headers; none for no line of headers.
    pub fn new(headers: Option<&[&str]>) -> Self {
        Self {
            rows: headers
                .map(|names| names.iter().map(|&name| name.to_owned()).collect())
                .into_iter()
                .collect(),
        }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// The text, each line ended.
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
            for (cell, width) in row.iter().zip(&widths) {
                // Writing to a String cannot fail.
                let _ = write!(line, "{cell:<width$}   ");
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

/// `1 pod`, `2 pods`.
pub(crate) fn count(number: usize, noun: &str) -> String {
    if number == 1 { format!("1 {noun}") } else { format!("{number} {noun}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell_in_characters() {
        let mut table = Table::new(Some(&["NAME", "FREE"]));
        table.row(vec!["├─ 0".to_owned(), "1Gi".to_owned()]);
        table.row(vec!["node-with-a-name".to_owned(), String::new()]);
        assert_eq!(
            table.render(),
            "NAME               FREE\n├─ 0               1Gi\nnode-with-a-name\n"
        );
    }

    #[test]
    fn without_headers_the_first_line_is_data() {
        let mut table = Table::new(None);
        table.row(vec!["a".to_owned(), "b".to_owned()]);
        assert_eq!(table.render(), "a   b\n");
    }
}
