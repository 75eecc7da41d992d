mod deaths;
mod sharing;
