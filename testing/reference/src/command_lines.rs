//! Page of the flags, from clap.

use clap::{Arg, Command, CommandFactory as _};

use crate::Page;
use crate::table::{code, header, table};

pub(crate) fn flags() -> Page {
    let mut text = header("Flags", "the programs' clap definitions");
    text.push_str("Each program prints the same with `--help`. A flag overrides its variable.\n");
    for mut command in [
        tessera_controller::Args::command(),
        tessera_driver::args::DriverArgs::command(),
        tessera_mps::args::MpsArgs::command(),
        tessera_cli::args::PluginArgs::command(),
    ] {
        // Propagates global flags and defaults.
        command.build();
        let name = command.get_bin_name().unwrap_or_else(|| command.get_name()).to_owned();
        section(&mut text, &name, &command);
    }
    Page { path: "docs/reference/flags.md", text }
}

fn section(text: &mut String, name: &str, command: &Command) {
    text.push_str(&format!("\n## {name}\n\n"));
    if let Some(about) = command.get_long_about().or_else(|| command.get_about()) {
        text.push_str(&wrapped(&about.to_string()));
        text.push('\n');
    }
    let rows: Vec<Vec<String>> = command
        .get_arguments()
        .filter(|arg| !arg.is_hide_set() && !["help", "version"].contains(&arg.get_id().as_str()))
        .map(row)
        .collect();
    if !rows.is_empty() {
        text.push_str(&table(&["Flag", "Variable", "Default", "Meaning"], &rows));
    }
    let is_shown = |sub: &&Command| !sub.is_hide_set() && sub.get_name() != "help";
    for sub in command.get_subcommands().filter(is_shown) {
        section(text, &format!("{name} {}", sub.get_name()), sub);
    }
}

fn row(arg: &Arg) -> Vec<String> {
    let values = arg.get_value_names().unwrap_or_default();
    let takes_value = arg.get_action().takes_values();
    let value = values.iter().map(|value| value.as_str()).collect::<Vec<_>>().join(" ");
    let flag = match arg.get_long() {
        Some(long) if takes_value => format!("--{long} {value}"),
        Some(long) => format!("--{long}"),
        None => value,
    };
    let flag = match arg.get_short() {
        Some(short) => format!("-{short}, {flag}"),
        None => flag,
    };
    let variable = arg.get_env().map(|name| name.to_string_lossy().into_owned());
    let shown_default = |arg: &Arg| takes_value && !arg.is_hide_default_value_set();
    let defaults: Vec<String> = arg
        .get_default_values()
        .iter()
        .filter(|_| shown_default(arg))
        .map(|value| format!("{:?}", value.to_string_lossy()).trim_matches('"').to_owned())
        .collect();
    let help = arg.get_long_help().or_else(|| arg.get_help());
    vec![
        code(&flag),
        code(&variable.unwrap_or_default()),
        code(&defaults.join(" ")),
        help.map(ToString::to_string).unwrap_or_default(),
    ]
}

/// Returns paragraphs, wrapped at 100 columns.
fn wrapped(text: &str) -> String {
    let mut lines = String::new();
    for paragraph in text.split("\n\n") {
        let mut column = 0;
        for word in paragraph.split_whitespace() {
            let width = word.chars().count();
            if column > 0 && column + 1 + width > 100 {
                lines.push('\n');
                column = 0;
            } else if column > 0 {
                lines.push(' ');
                column += 1;
            }
            lines.push_str(word);
            column += width;
        }
        lines.push_str("\n\n");
    }
    lines.truncate(lines.trim_end().len());
    lines.push('\n');
    lines
}
