//! Markdown.

/// Beginning of each page.
pub(crate) fn header(title: &str, source: &str) -> String {
    format!("# {title}\n\n<!-- Generated from {source} by `make reference`; do not edit. -->\n\n")
}

/// Returns a table. Cells may hold any text: `|` is escaped, line breaks become spaces.
pub(crate) fn table(columns: &[&str], rows: &[Vec<String>]) -> String {
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let mut text = line(columns.iter().map(|cell| (*cell).to_owned()).collect());
    text.push_str(&format!("|{}\n", "---|".repeat(columns.len())));
    for row in rows {
        text.push_str(&line(row.iter().map(|cell| escaped(cell)).collect()));
    }
    text
}

fn escaped(cell: &str) -> String {
    cell.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

/// Returns `text` as code, or nothing for nothing.
pub(crate) fn code(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("`{text}`") }
}
