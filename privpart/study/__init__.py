"""Study: many trainings of changed copies of one plan, and the tables that they make."""
