import { startTheme } from "../shared/theme.js";

startTheme();
