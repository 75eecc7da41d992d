//! What the demo prints on: headings, explanations, YAML, tables.

use std::cell::Cell;
use std::io::{IsTerminal, Write};

/// Standard output, in colour where a person looks at it.
#[derive(Debug)]
pub(crate) struct Screen {
    colour: bool,
    steps: Cell<u32>,
}

impl Screen {
    pub(crate) fn of_stdout() -> Self {
        let colour = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        Self { colour, steps: Cell::new(0) }
    }

    fn paint(&self, style: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{style}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// The title of everything.
    pub(crate) fn title(&self, text: &str) {
        print(&format!("\n{}\n", self.paint("1;36", text)));
    }

    /// An empty line.
    pub(crate) fn gap(&self) {
        print("");
    }

    /// A numbered heading.
    pub(crate) fn step(&self, text: &str) {
        self.steps.set(self.steps.get() + 1);
        print(&format!("\n{}", self.paint("1;33", &format!("{}. {text}", self.steps.get()))));
    }

    /// A line of explanation.
    pub(crate) fn say(&self, text: &str) {
        print(&format!("   {text}"));
    }

    /// Something that holds.
    pub(crate) fn good(&self, text: &str) {
        print(&format!("   {} {text}", self.paint("32", "✓")));
    }

    /// Text as it stands in a file or came out of a program.
    pub(crate) fn quote(&self, text: &str) {
        print("");
        for line in text.lines() {
            print(&format!("     {}", self.paint("2", line)));
        }
        print("");
    }

    /// Columns as wide as their widest cell.
    pub(crate) fn table(&self, header: &[&str], rows: &[Vec<String>]) {
        let width = |column: usize| {
            let cells =
                rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
            cells.chain([header[column].chars().count()]).max().unwrap_or(0)
        };
        let widths: Vec<_> = (0..header.len()).map(width).collect();
        let line = |cells: &mut dyn Iterator<Item = &str>| {
            let cells: Vec<_> =
                cells.zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
            cells.join("  ").trim_end().to_owned()
        };
        print(&format!("\n     {}", self.paint("1", &line(&mut header.iter().copied()))));
        for row in rows {
            print(&format!("     {}", line(&mut row.iter().map(String::as_str))));
        }
        print("");
    }
}

/// Prints a line. A reader that has seen enough (`demo | head`) is no reason to stop half-way and
/// leave things running.
fn print(line: &str) {
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}
