"""Pure functions: facts to outcomes. `natslog.diagnosis.doctor.CHECKS` lists all of them."""
