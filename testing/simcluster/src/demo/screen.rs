//! Output of the demo: headings, explanations, YAML, tables.

use std::cell::Cell;
use std::io::{IsTerminal, Write};

/// Columns available to a wrapped paragraph.
const WIDTH: usize = 92;

/// Standard output, with colour on a terminal.
#[derive(Debug)]
pub(crate) struct Screen {
    colour: bool,
    steps: Cell<u32>,
    /// True if the last line was empty, so that gaps are never two lines high.
    after_gap: Cell<bool>,
}

impl Screen {
    pub(crate) fn of_stdout() -> Self {
        let colour = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        Self { colour, steps: Cell::new(0), after_gap: Cell::new(false) }
    }

    fn paint(&self, style: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{style}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// Prints the title.
    pub(crate) fn title(&self, text: &str) {
        self.gap();
        self.print(&self.paint("1;36", text));
        self.gap();
    }

    /// Prints an empty line, unless the last line is empty.
    pub(crate) fn gap(&self) {
        if !self.after_gap.replace(true) {
            write_line("");
        }
    }

    /// Prints a numbered heading.
    pub(crate) fn step(&self, text: &str) {
        self.steps.set(self.steps.get() + 1);
        self.gap();
        self.print(&self.paint("1;33", &format!("{}. {text}", self.steps.get())));
    }

    /// Prints a line of explanation.
    pub(crate) fn say(&self, text: &str) {
        self.print(&format!("   {text}"));
    }

    /// Prints a verified result.
    pub(crate) fn good(&self, text: &str) {
        self.print(&format!("   {} {text}", self.paint("32", "✓")));
    }

    /// Prints the message of an event, wrapped.
    pub(crate) fn message(&self, text: &str) {
        let mut line = String::new();
        for word in text.split_whitespace() {
            if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > WIDTH {
                self.print(&format!("     {line}"));
                line.clear();
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
        self.print(&format!("     {line}"));
    }

    /// Prints lines of YAML, dimmed.
    pub(crate) fn yaml<'a>(&self, lines: impl IntoIterator<Item = &'a str>) {
        for line in lines {
            self.print(&format!("     {}", self.paint("2", line)));
        }
    }

    /// Prints commands with their purposes in a second column.
    pub(crate) fn commands(&self, commands: &[(&str, &str)]) {
        let width = commands.iter().map(|(command, _)| command.chars().count()).max().unwrap_or(0);
        for (command, purpose) in commands {
            let padding = " ".repeat(width - command.chars().count());
            let purpose = if purpose.is_empty() { String::new() } else { format!("  # {purpose}") };
            let command = self.paint("1", command);
            self.print(format!("     {command}{padding}{purpose}").trim_end());
        }
    }

    /// Prints a table with columns as wide as their widest cells.
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
        self.print(&format!("     {}", self.paint("1", &line(&mut header.iter().copied()))));
        for row in rows {
            self.print(&format!("     {}", line(&mut row.iter().map(String::as_str))));
        }
    }

    fn print(&self, line: &str) {
        self.after_gap.set(line.is_empty());
        write_line(line);
    }
}

/// Prints a line. A closed pipe (`demo | head`) is ignored, so that the demo ends in order.
fn write_line(line: &str) {
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}
