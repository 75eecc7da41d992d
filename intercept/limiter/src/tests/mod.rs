mod compute;
mod deaths;
mod sharing;
mod tokens;
